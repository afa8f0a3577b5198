"""Files and folders of exports that a kill has left incomplete, and those that are being written."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.restore.atomic_output import atomic_file, atomic_folder, remove_partial_files


def write(kind: str, path: Path, *, is_killed: bool = False) -> None:
    """Write an output; killed, in another process, while it is incomplete."""
    if is_killed:
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            return
    output = (
        atomic_file(path, overwrite=True) if kind == "file" else atomic_folder(path, ["a"], overwrite=True)
    )
    with output as partial:
        (partial if kind == "file" else partial / "a").write_text("whole")
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_output_removes_what_a_kill_has_left(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "out [1].pt", is_killed=True)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".partial")
    write(kind, tmp_path / "another.pt")
    assert left.exists()
    write(kind, tmp_path / "out [1].pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another.pt", "out [1].pt"]


def test_an_output_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "out.pt", overwrite=True) as partial:
        write("file", tmp_path / "out.pt")
        remove_partial_files(tmp_path)
        partial.write_text("newer")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["newer"]
