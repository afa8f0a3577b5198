"""The keeper as a process: how many there are, how small, and that they outlive their trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import holdfast
from holdfast.errors import Internal, InvalidInput, RetryLater, SaveWarning
from stage.training import check_saved, make_checkpointer


def keepers() -> list[psutil.Process]:
    """The living keepers that this process has started."""
    children = psutil.Process().children()
    return [
        child for child in children if child.status() != "zombie" and "holdfast.keeper" in child.cmdline()
    ]


def pid_of(ckpt: holdfast.Checkpointer) -> int:
    assert ckpt._keeper is not None
    return ckpt._keeper.pid


def test_each_checkpointer_has_one_keeper_until_it_is_closed(tmp_path: Path) -> None:
    first = make_checkpointer(tmp_path / "a", {"x": torch.ones(3)})
    second = make_checkpointer(tmp_path / "b", {"x": torch.ones(3)})
    assert keepers() == []
    for step in (1, 2):
        first.save(step)
        second.save(step)
        assert {keeper.pid for keeper in keepers()} == {pid_of(first), pid_of(second)}
        assert len(keepers()) == 2
    first.close()
    assert [keeper.pid for keeper in keepers()] == [pid_of(second)]
    second.close()
    second.close()
    assert keepers() == []


def test_a_checkpointer_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def open_ones() -> Counter[tuple[str, int]]:
        """What descriptors stand for, and how many do."""
        found: Counter[tuple[str, int]] = Counter()
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that of this listing
                found[str(path.readlink()), path.stat().st_ino] += 1
        return found

    def use(name: str) -> None:
        others = {*threading.enumerate()}  # of checkpointers that other tests have not closed
        with make_checkpointer(tmp_path / name, {"x": torch.ones(3)}) as ckpt:
            ckpt.save(1)
        for thread in {*threading.enumerate()} - others:
            if thread.name == "holdfast-listen":
                thread.join()

    use("first")
    before = open_ones()
    use("second")
    use("third")
    assert open_ones() - before == Counter()  # some of other tests may have been closed meanwhile


def save_and_fail(home: Path, x: torch.Tensor, step: int) -> None:
    """Go on from the step before, save this one, and leave the with block by an error."""
    with make_checkpointer(home, {"x": x}) as ckpt:
        assert (ckpt.restore() or 0) == step - 1
        x += 1
        ckpt.save(step)
        raise ZeroDivisionError


def test_an_error_in_the_loop_loses_nothing_staged_and_leaves_no_keeper(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with pytest.raises(ZeroDivisionError):
        save_and_fail(tmp_path / "home", x, 1)
    psutil.wait_procs(keepers(), timeout=20)
    assert keepers() == []
    check_saved(tmp_path / "home", 1, {"x": x})


def test_a_new_checkpointer_in_the_same_process_waits_for_what_an_error_left_behind(tmp_path: Path) -> None:
    """A retry around the with block: what was staged at the error is what the next attempt restores."""
    x = expected = torch.randn(20_000_000)
    for step in (1, 2, 3):
        with pytest.raises(ZeroDivisionError):
            save_and_fail(tmp_path / "home", x, step)
        expected = x.clone()
    with make_checkpointer(tmp_path / "home", {"x": x}) as ckpt:
        assert ckpt.restore() == 3
    assert torch.equal(x, expected)


def test_a_keeper_is_small_and_never_imports_torch(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(1_000_000)}) as ckpt:
        ckpt.save(1).wait_durable()
        pid = pid_of(ckpt)
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "python" in maps
        assert "libtorch" not in maps
        assert "numpy" not in maps
        regions = psutil.Process(pid).memory_maps(grouped=False)
        pss = sum(region.pss for region in regions if "holdfast-arena" not in region.path)
        assert pss < 60e6


TRAINER = """
import os, signal, sys, torch, holdfast
ckpt = holdfast.Checkpointer(sys.argv[1], {"x": torch.arange(3_000_000.0)}, quiet=True)
ckpt.save(7).wait_staged()
ending = sys.argv[2]
print(ckpt._keeper.pid, flush=True)
os._exit(3) if ending == "_exit" else os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", ["_exit", "kill"])
def test_a_keeper_finishes_after_its_trainers_sudden_end_and_goes(tmp_path: Path, ending: str) -> None:
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "home"), ending]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == (3 if ending == "_exit" else -signal.SIGKILL)
    with make_checkpointer(tmp_path / "home", {"x": torch.zeros(3_000_000)}) as ckpt:
        assert ckpt.restore() == 7  # waits for that keeper
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie"
    check_saved(tmp_path / "home", 7, {"x": torch.arange(3_000_000.0)})


def test_a_dead_keeper_is_replaced_and_told_what_is_left(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with make_checkpointer(tmp_path / "home", {"x": x}) as ckpt:
        ckpt.save(1).wait_durable()
        old = pid_of(ckpt)
        os.kill(old, signal.SIGSTOP)
        save = ckpt.save(2)
        save.wait_staged()
        os.kill(old, signal.SIGKILL)
        save.wait_durable(20)
        assert pid_of(ckpt) != old
        with pytest.warns(
            SaveWarning, match=rf"\(pid {old}\) died \(SIGKILL\)\. Another one .* its 1 unfinished"
        ):
            ckpt.save(3)
    check_saved(tmp_path / "home", 3, {"x": x})


def test_a_keeper_that_cannot_be_started_again_fails_the_saves_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    ckpt = make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}, max_failures=0)
    ckpt.save(1).wait_durable()
    with monkeypatch.context() as patch:
        os.kill(pid_of(ckpt), signal.SIGSTOP)
        save = ckpt.save(2)
        save.wait_staged()
        patch.setattr(subprocess, "Popen", refuse)
        os.kill(pid_of(ckpt), signal.SIGKILL)
        with pytest.raises(RetryLater, match=r"No other could be started .* saving is given up"):
            save.wait_durable(20)
    with pytest.raises(RetryLater, match="given up"):
        ckpt.save(3)
    ckpt.close()


def test_keepers_that_keep_dying_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper killed at the same place each time: the sixth death is the last."""
    monkeypatch.setenv("HOLDFAST_KILL_AT", "keeper.received")
    ckpt = make_checkpointer(tmp_path / "home", {"x": torch.ones(3)})
    save = ckpt.save(1)
    with pytest.raises(Internal, match="6th in a row; saving is given up"):
        save.wait_durable(60)
    with pytest.warns(SaveWarning, match="died"):
        save = ckpt.save(2)
    with pytest.raises(Internal, match="6th in a row"):
        save.wait_durable(20)
    with pytest.raises(Internal, match="6th in a row"):
        ckpt.close()
    assert keepers() == []


def test_a_forked_child_cannot_end_its_parents_keeper(tmp_path: Path) -> None:
    """A child that leaves the with block by an error, or saves or closes, leaves the keeper alone."""
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        ckpt.save(1).wait_durable()
        before = pid_of(ckpt)
        child = os.fork()
        if not child:
            status = 1
            try:
                ckpt.save(2)
            except InvalidInput as error:
                ckpt.close()
                ckpt.__exit__(type(error), error, None)
                status = 0 if "carried into process" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ckpt.save(3).wait_durable()
        assert pid_of(ckpt) == before
