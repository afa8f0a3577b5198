"""Temporary files and folders that a kill at any moment leaves, and those that are being written."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.adapters.recipe import load_checkpoint, save_checkpoint
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, Lockfile, running_keepers
from holdfast.checkpoint.keeper.memory_store import offer_images
from holdfast.checkpoint.restore.atomic_output import atomic_file, atomic_folder
from holdfast.checkpoint.store.local import LocalStore
from holdfast.cli.experiment import trials
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.partial_files import partial_file, remove_partial_files, temporary_folder
from kills import kill_before_change

Writer = Callable[[Path], None]


def write_output(folder: Path) -> None:
    with atomic_file(folder / "out [1].pt", overwrite=True) as partial:
        partial.write_text("whole")


def write_folder(folder: Path) -> None:
    with atomic_folder(folder / "out", ["a"], overwrite=True) as partial:
        (partial / "a").write_text("whole")


def write_document(folder: Path) -> None:
    write_atomic(folder / "plan.json", "{}")


def use_temporary_folder(_: Path) -> None:
    with temporary_folder("node") as room:
        (room / "bell").touch()


def run_trials(folder: Path) -> None:
    words = {"script": sys.executable, "args": [], "timeout": "1m", "keep": str(folder / "kept")}
    with trials("check", argparse.Namespace(**words)) as found:
        (found.folder / "log").write_text("x")


def put(folder: Path) -> None:
    store = LocalStore(folder)
    store.sweep()
    store.put("a/b", b"whole")


def map_weights_of_a_run(folder: Path) -> None:
    import torch

    import holdfast
    from holdfast.checkpoint.exchange.exporter import map_weights

    home = folder / "home"
    if not home.exists():
        model, watches = torch.nn.Linear(2, 2), [holdfast.CompileCache("off")]
        with holdfast.Checkpointer(home, {"model": model}, watches=watches) as ckpt:
            ckpt.save(1)
    map_weights(holdfast.open(home), "model", folder)


def keep(folder: Path) -> None:
    """Start as a keeper does, after others of the home, and offer memory."""
    assert not list(running_keepers(str(folder)))
    lockfile = Lockfile.create(str(folder), KeeperInfo(1, 0, os.getpid(), 0, busy=True))
    offer_images(lockfile, dict, timeout_s=0)
    lockfile.remove()


def save_steps(folder: Path) -> None:
    """Save two steps of which one is kept, and the last of them again."""
    for step, text in ((1, "a"), (2, "b"), (2, "c")):
        _step_saver(folder)(step, text)


def resume_steps(folder: Path) -> None:
    """Load the newest step, and save the next ones."""

    @load_checkpoint(str(folder))
    def load(step: int) -> int:
        assert (folder / f"model_{step}.pt").read_text() in ("a", "b", "c")
        return step

    for step in range((load(0) or 0) + 1, 4):
        _step_saver(folder)(step, "d")


def _step_saver(folder: Path) -> Callable[[int, str], None]:
    @save_checkpoint(str(folder), max_checkpoints=1)
    def save(step: int, text: str) -> None:
        (folder / f"model_{step}.pt").write_text(text)

    return save


def kill_at(number: int, write: Writer, folder: Path) -> bool:
    """Run a writer in another process, killed before a change. Return False if it has fewer changes."""
    child = os.fork()
    if child == 0:
        kill_before_change(number)
        try:
            write(folder)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "resume", "every"),
    [
        *((one, one, 1) for one in (write_output, write_folder, write_document, use_temporary_folder)),
        *((one, one, 1) for one in (run_trials, put, keep)),
        (map_weights_of_a_run, map_weights_of_a_run, 4),
        pytest.param(map_weights_of_a_run, map_weights_of_a_run, 1, marks=pytest.mark.slow),
        (save_steps, resume_steps, 11),
        pytest.param(save_steps, resume_steps, 1, marks=pytest.mark.slow),
    ],
)
def test_the_next_start_removes_what_a_kill_at_any_change_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Writer, resume: Writer, every: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    write(tmp_path)
    resume(tmp_path)
    wanted, num_left, number = names_in(tmp_path), 0, 1
    if resume is not write:
        shutil.rmtree(tmp_path)
    while kill_at(number, write, tmp_path):
        num_left += names_in(tmp_path) != wanted
        resume(tmp_path)
        assert names_in(tmp_path) == wanted, f"killed before change {number}"
        if resume is not write:
            shutil.rmtree(tmp_path)
        number += every
    assert num_left, "no kill left anything"


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    with partial_file(tmp_path / "out.pt") as partial:
        write_atomic(tmp_path / "out.pt", "older")
        remove_partial_files(tmp_path)
        partial.write_text("newer")
        partial.replace(tmp_path / "out.pt")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["newer"]


def test_files_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / ".out.pt.partial", tmp_path / ".other.0123456789abcdef.partial"]
    for path in others:
        path.touch()
    write_atomic(tmp_path / "out.pt", "whole")
    assert all(path.exists() for path in others)
