"""Detection of places that are the same, or inside each other, under any names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import holdfast
from holdfast.checkpoint.run.tiers import check_disjoint
from holdfast.checkpoint.store import open_store
from holdfast.errors import InvalidInput

PAIRS = [
    ("{d}/home", "{d}/home/", True),
    ("{d}/home", "{d}/link", True),
    ("{d}/home", "{d}/link/x/y", True),
    ("{d}/home", "file://{d}/home", True),
    ("{d}/home", "FILE://{d}/home/../home", True),
    ("{d}/home", "home", True),
    ("{d}/home", "other/../home/z", True),
    ("{d}/home", "{d}", True),
    ("{d}/home", "{d}/homes", False),
    ("{d}/new", "{d}/new/inside", True),
    ("{d}/new", "{d}/New", False),
    ("{d}/new/a", "{d}/new/b", False),
    ("s3://b/x", "s3://b/x/y", True),
    ("s3://b/x", "s3a://b/x/", True),
    ("s3://b", "s3://b/xy", True),
    ("s3://b/x", "s3://b/xy", False),
    ("s3://b/x", "gs://b/x", False),
    ("s3://b/x", "{d}/home", False),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_refused(home: str, local: str) -> bool:
    try:
        check_disjoint(open_store(home), open_store(local))
    except InvalidInput:
        return True
    return False


@pytest.mark.parametrize(("one", "other", "overlap"), PAIRS)
def test_overlapping_places_are_refused(folder: Path, one: str, other: str, overlap: bool) -> None:
    home, local = one.format(d=folder), other.format(d=folder)
    assert is_refused(home, local) == overlap
    assert is_refused(local, home) == overlap


def test_a_bind_mount_of_a_part_of_home_is_detected(folder: Path) -> None:
    (folder / "bound").mkdir()
    command = ["mount", "--bind", str(folder / "home" / "sub"), str(folder / "bound")]
    if os.getuid() != 0 or subprocess.call(command):
        pytest.skip("mounting needs root")
    try:
        assert is_refused(str(folder / "home"), str(folder / "bound"))
        assert is_refused(str(folder / "home"), str(folder / "bound" / "new"))
        assert is_refused(str(folder / "bound"), str(folder / "home"))
    finally:
        subprocess.check_call(["umount", str(folder / "bound")])


@pytest.mark.parametrize("local", ["home", "home/near", ".", "link"])
def test_a_checkpointer_is_not_made_with_them(folder: Path, local: str) -> None:
    watches = [holdfast.Preemption(signals=False)]
    with pytest.raises(InvalidInput, match="are the same place, or one is inside the other"):
        holdfast.Checkpointer(folder / "home", {"x": 1}, local=folder / local, watches=watches)
