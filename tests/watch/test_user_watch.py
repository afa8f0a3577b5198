"""The how-to's watch of a user: its files are written as the page shows them, and run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import holdfast
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.store import open_store

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "write-a-watch.md"


def test_the_watch_of_the_page_stops_the_run_and_passes_the_suite(tmp_path: Path) -> None:
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.S):
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 75, done.stderr
    assert "accuracy has not improved since step 51" in done.stderr
    assert holdfast.open(tmp_path / "run").step == 81
    manifest = read_manifest(open_store(tmp_path / "run"), CheckpointId(attempt=1, step=80), None)
    assert manifest.watches["patience"].data == {"best": [0.5, 51]}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "resumes or torch", "."]
    suite = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert suite.returncode == 0, suite.stdout
    assert "2 passed" in suite.stdout
