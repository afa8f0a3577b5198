"""SkyPilot's own example files: jobs that it accepts are accepted, or refused for a known reason.

They are not part of this repository. `make test-all` clones SkyPilot into `.skypilot`; SKYPILOT_SOURCE names
another checkout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.errors import HoldfastError
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.task.parser import Overrides, load_tasks
from jobs.sky.installed import skypilot

SOURCE = os.environ.get("SKYPILOT_SOURCE", str(Path(__file__).parents[3] / ".skypilot"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(SOURCE).is_dir(), reason="no checkout of SkyPilot: `make .skypilot`"),
]
REASONS = {
    "files of its author": r"does not exist\. Nothing was started",
    "rclone": r"requires the program rclone",
    "another store": r"unknown scheme \((oci|nebius)://\)",
    "name of a bucket left out": r"expected a source or the name of a bucket, found neither",
    "cluster without commands": r"run: expected the commands of the job, found nothing",
}
"""Reasons for which a file that SkyPilot accepts may be refused."""
_THEIRS = """
import json, os, sys
from sky.utils import dag_utils
verdicts = {}
for path, names in json.load(sys.stdin).items():
    os.chdir(os.path.dirname(path))
    try:
        dag = dag_utils.load_chain_dag_from_yaml(
            path, [(name, "x") for name in names["envs"]], [(name, "x") for name in names["secrets"]])
        verdicts[path] = "service" if any(task.service for task in dag.tasks) else "job"
    except (Exception, SystemExit) as error:
        verdicts[path] = f"refused: {error}"
print(json.dumps(verdicts))
"""


def examples() -> dict[str, dict[str, list[str]]]:
    """Return the files, and the variables of each that have no value."""
    found = {}
    for folder in ("examples", "llm", "docs"):
        for path in sorted(Path(SOURCE, folder).rglob("*.y*ml")):
            try:
                documents = [one for one in yaml.safe_load_all(path.read_text()) if isinstance(one, dict)]
            except yaml.YAMLError:
                continue
            found[str(path.absolute())] = {key: _unset(documents, key) for key in ("envs", "secrets")}
    return found


def _unset(documents: list[dict[str, Any]], key: str) -> list[str]:
    variables = [one[key] for one in documents if isinstance(one.get(key), dict)]
    return sorted({str(name) for one in variables for name, value in one.items() if value is None})


def ours(path: str, unset: dict[str, list[str]], folder: Path) -> str:
    """Return the error for a file that is launched in a folder, or nothing."""
    given = Overrides(envs=dict.fromkeys(unset["envs"], "x"), secrets=dict.fromkeys(unset["secrets"], "x"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            LocalEngine().check_file(load_tasks(path, given))
        except HoldfastError as error:
            return str(error)
    return ""


def test_what_skypilot_accepts_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    files = examples()
    assert files
    words, given = [skypilot() / "python", "-c", _THEIRS], json.dumps(files)
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    answer = subprocess.run(words, input=given, env=env, capture_output=True, text=True, check=True)
    theirs = json.loads(answer.stdout.splitlines()[-1])
    counts: Counter[tuple[str, str]] = Counter()
    unexplained = []
    for path, unset in files.items():
        folders = (Path(path).parent, Path(SOURCE))  # paths are relative to one or the other
        error = min((ours(path, unset, folder) for folder in folders), key=len)
        reason = next((name for name, words in REASONS.items() if re.search(words, error)), "another")
        verdict = theirs[path].split(":")[0]
        counts[verdict, reason if error else "accepted"] += 1
        if verdict == "job" and error and reason == "another":
            unexplained.append(error)
        assert verdict != "service" or "`sky " in error, f"{path}: the error names the command: {error}"
    with capsys.disabled():
        sys.stdout.write(f"\n{len(files)} files\n")
        for (verdict, mine), number in sorted(counts.items()):
            sys.stdout.write(f"{number:5} {verdict:8} {mine}\n")
    assert not unexplained
