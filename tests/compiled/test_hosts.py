"""Several hosts: each gets what any of them has compiled, and what all have is sent once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.watch.compiled.index import FOLDER, CacheIndex, IndexName, parse, parse_name

HERE = Path(__file__).parent


def start(home: Path, folder: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *launcher, str(HERE / "hosts.py"), str(home), str(folder)]
    folder.mkdir()
    env = {**os.environ, "TMPDIR": str(folder)}  # else headers that others have compiled here would be sent
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def indices_of(home: Path) -> list[CacheIndex]:
    store = open_store(home)
    names = [entry.name for entry in store.list(FOLDER)]
    return [parse(store.get(name), name) for name in names if isinstance(parse_name(name), IndexName)]


@pytest.mark.slow
@pytest.mark.ranks
def test_each_host_receives_the_code_that_any_host_compiled(tmp_path: Path):
    home = tmp_path / "home"
    start(home, tmp_path / "first")
    assert {index.rank for index in indices_of(home)} == {0, 1}
    listed = [file.path for index in indices_of(home) for file in index.files]
    assert {"made-0-0", "made-1-0", "common-0"} == set(listed)
    start(home, tmp_path / "second")
    for rank in (0, 1):
        found = {path.name for path in (tmp_path / "second" / f"host-{rank}").iterdir()}
        assert {"made-0-0", "made-1-0", "common-0"} <= found
