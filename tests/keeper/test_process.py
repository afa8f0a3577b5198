"""The keeper as a process: how many there are, how small, and that they outlive their trainer."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import holdfast
from holdfast.checkpoint.keeper import child_process, client, packets
from holdfast.checkpoint.keeper.messages import Ping, Pong, RecordEvent, SaveReached
from holdfast.checkpoint.keeper.packets import Outbox
from holdfast.errors import Denied, HoldfastError, InvalidInput, RetryLater, SaveWarning
from stage.training import check_saved, keeper_of, make_checkpointer, wait_until


def keepers() -> list[psutil.Process]:
    """The living keepers that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is about to
            words = child.cmdline()
            # A process that has only just been started may have no arguments yet.
            if "holdfast.checkpoint.keeper" in words or (
                not words and child.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(child)
    return found


def wait_for_keepers(*expected: holdfast.Checkpointer) -> None:
    """Wait until the living keepers are those of some checkpointers."""
    wait_until(lambda: sorted(keeper.pid for keeper in keepers()) == sorted(map(pid_of, expected)))


def pid_of(ckpt: holdfast.Checkpointer) -> int:
    return keeper_of(ckpt).pid


def test_each_checkpointer_has_one_keeper_until_it_is_closed(tmp_path: Path) -> None:
    first = make_checkpointer(tmp_path / "a", {"x": torch.ones(3)})
    second = make_checkpointer(tmp_path / "b", {"x": torch.ones(3)})
    wait_for_keepers()
    for step in (1, 2):
        first.save(step)
        second.save(step)
        wait_for_keepers(first, second)
    first.close()
    wait_for_keepers(second)
    second.close()
    second.close()
    wait_for_keepers()


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
    """Continue from the previous step, save this one, and leave the with block by an error."""
    with make_checkpointer(home, {"x": x}) as ckpt:
        assert (ckpt.restore() or 0) == step - 1
        x += 1
        ckpt.save(step)
        raise ZeroDivisionError


def test_an_error_in_the_loop_loses_no_staged_save_and_leaves_no_keeper(tmp_path: Path) -> None:
    """A retry around the with block: what was staged at the error is what the next attempt restores."""
    x = expected = torch.randn(20_000_000)
    for step in (1, 2, 3):
        with pytest.raises(ZeroDivisionError):
            save_and_fail(tmp_path / "home", x, step)
        expected = x.clone()
    wait_for_keepers()
    check_saved(tmp_path / "home", 3, {"x": expected})
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
        regions = psutil.Process(pid).memory_maps(grouped=False)
        pss = sum(region.pss for region in regions if "holdfast-arena" not in region.path)
        assert pss < 60e6


TRAINER = """
import os, signal, sys, torch, holdfast
ckpt = holdfast.Checkpointer(sys.argv[1], {"x": torch.arange(3_000_000.0)}, quiet=True)
ckpt.save(7).wait_staged()
ending = sys.argv[2]
print(ckpt._training.attempt.keeper.pid, flush=True)
os._exit(3) if ending == "_exit" else os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.essential
@pytest.mark.parametrize("ending", ["_exit", "kill"])
def test_a_keeper_completes_the_save_of_a_killed_trainer_and_exits(tmp_path: Path, ending: str) -> None:
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "home"), ending]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == (3 if ending == "_exit" else -signal.SIGKILL)
    with make_checkpointer(tmp_path / "home", {"x": torch.zeros(3_000_000)}) as ckpt:
        assert ckpt.restore() == 7  # waits for that keeper
        ckpt.save(8)  # and nobody will want what it holds in memory
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie"
    check_saved(tmp_path / "home", 7, {"x": torch.arange(3_000_000.0)})


def test_a_dead_keeper_is_replaced_by_one_that_completes_its_saves(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with make_checkpointer(tmp_path / "home", {"x": x}) as ckpt:
        ckpt.save(1).wait_durable()
        old = pid_of(ckpt)
        os.kill(old, signal.SIGSTOP)
        save = ckpt.save(2)
        save.wait_staged()
        os.kill(old, signal.SIGKILL)
        save.wait_durable(600)
        assert pid_of(ckpt) != old
        with pytest.warns(
            SaveWarning, match=rf"\(pid {old}\) died \(SIGKILL\)\. Another one .* its 1 unfinished"
        ):
            ckpt.save(3)
    check_saved(tmp_path / "home", 3, {"x": x})


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pauses before another keeper is started a tenth as long as usual."""
    for name in ("_FIRST_PAUSE_S", "_LAST_PAUSE_S"):
        monkeypatch.setattr(client, name, 0.1 * getattr(client, name))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, quick_pauses: None) -> None:
    """Make checks and pauses a tenth as long as usual, but let a keeper start as slowly as usual."""
    monkeypatch.setattr(child_process, "_CHECK_S", 0.1 * child_process._CHECK_S)
    monkeypatch.setattr(child_process, "_MAX_START_CHECKS", 10 * child_process._MAX_START_CHECKS)
    monkeypatch.setattr(child_process, "_MAX_SILENT_CHECKS", 30)


@pytest.fixture
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a keeper be silent for as long as the test needs."""
    monkeypatch.setattr(child_process, "_MAX_SILENT_CHECKS", 10**9)


@pytest.mark.usefixtures("quick_pauses")
def test_starting_a_keeper_is_retried_and_no_save_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = subprocess.Popen, threading.Event()

    def refuse(*_: Any, **__: Any) -> None:
        refused.set()
        raise OSError(11, "Resource temporarily unavailable")

    with make_checkpointer(
        tmp_path / "home", {"x": torch.ones(3)}, limits=holdfast.Limits(failed_saves="raise")
    ) as ckpt:
        ckpt.save(1).wait_durable()
        os.kill(pid_of(ckpt), signal.SIGSTOP)
        save = ckpt.save(2)
        save.wait_staged()
        monkeypatch.setattr(subprocess, "Popen", refuse)
        os.kill(pid_of(ckpt), signal.SIGKILL)
        assert refused.wait(600)
        monkeypatch.setattr(subprocess, "Popen", start)
        save.wait_durable(600)
        with pytest.warns(SaveWarning, match="No other keeper could be started"):
            ckpt.save(3)
    check_saved(tmp_path / "home", 3, {"x": torch.ones(3)})


@pytest.mark.filterwarnings("ignore::holdfast.errors.SaveWarning")
@pytest.mark.usefixtures("quick")
def test_keepers_that_die_repeatedly_fail_their_saves_and_later_saves_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper killed at the same place each time: the saves of the sixth fail, and the seventh works."""
    monkeypatch.setenv("HOLDFAST_KILL_AT", "keeper.received")
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        save = ckpt.save(1)
        with pytest.raises(RetryLater, match=r"number 6 in a row; the saves that it had are given up"):
            save.wait_durable(600)
        monkeypatch.delenv("HOLDFAST_KILL_AT")
        with pytest.warns(SaveWarning, match="died"):
            save = ckpt.save(2)
        save.wait_durable(600)
        assert ckpt.latest_step() == 2
    wait_for_keepers()
    check_saved(tmp_path / "home", 2, {"x": torch.ones(3)})


@pytest.mark.usefixtures("endless_patience")
def test_a_stopped_keeper_stops_no_training_and_is_replaced(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """More messages than its socket has room for: none of them waits for it."""
    x = torch.arange(1000.0)
    with make_checkpointer(
        tmp_path / "home", {"x": x}, memory=holdfast.Memory("1MiB", when_full="skip")
    ) as ckpt:
        ckpt.save(1).wait_durable()
        stopped = psutil.Process(pid_of(ckpt))
        stopped.suspend()
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        for step in range(2, 12):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ckpt.save(step)
            for number in range(100):
                keeper_of(ckpt).record("saved", step=step, detail=f"{number}")
                ckpt.record(loss=1.0)
        assert stopped.status() == psutil.STATUS_STOPPED, "training did not wait until it was replaced"
        pending = ckpt._training.attempt.saves.pending
        request.getfixturevalue("quick")
        for save in pending:
            save.wait_durable(600)
        assert pid_of(ckpt) != stopped.pid
        with pytest.warns(SaveWarning, match=rf"\(pid {stopped.pid}\) did not answer for .* was killed"):
            ckpt.save(20).wait_durable()
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
    check_saved(tmp_path / "home", 20, {"x": x})


@pytest.mark.usefixtures("endless_patience")
def test_a_wait_for_a_stopped_keeper_says_so(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        ckpt.save(1).wait_durable()
        stopped = psutil.Process(pid_of(ckpt))
        stopped.suspend()
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        had = rf"The keeper of rank 0 \(pid {stopped.pid}\) has had step 2 for [\d.]+ m?s"
        with pytest.raises(RetryLater, match=rf"{had} .* to {tmp_path}/home: the process is stopped"):
            ckpt.save(2).wait_durable(0.1)
        stopped.resume()


@pytest.mark.parametrize(
    ("call", "matching", "reason"),
    [
        ("fsync", "", r"\(pid {}\) has had step 2 for .*s and has not finished writing it to {}/home"),
        ("link", "manifest-", r"Its files of this rank are in {1}/home, .* waited .*s for its manifest"),
    ],
    ids=["fsync", "manifest"],
)
def test_a_wait_for_a_write_that_does_not_return_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, matching: str, reason: str
) -> None:
    """As of a disk or a server that does not answer: the keeper itself still does, and is not replaced."""
    stall, started = tmp_path / "stall", tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        f"def stalled(*args, call=os.{call}, **more):\n"
        f"    while os.path.exists({str(stall)!r}) and {matching!r} in str(args[-1]):\n"
        f"        open({str(started)!r}, 'a').close()\n"
        "        time.sleep(0.01)\n"
        "    return call(*args, **more)\n"
        f"os.{call} = stalled\n"
    )
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
        ckpt = make_checkpointer(tmp_path / "home", {"x": torch.ones(3)})
        ckpt.save(1).wait_durable()
    stall.touch()
    saves = [ckpt.save(2)]
    wait_until(started.exists)
    saves.append(ckpt.save(3))
    reason = reason.format(pid_of(ckpt), tmp_path)
    waits = [lambda: saves[0].wait_durable(0.1), lambda: ckpt.wait(0.1), lambda: ckpt.close(0.1)]
    for wait in waits if matching else [*waits, lambda: saves[1].wait_durable(0.1)]:
        with pytest.raises(TimeoutError, match=rf"Step [23] is not durable after 0\.\d* s\. .*{reason}"):
            wait()
    stall.unlink()
    for save in saves:
        save.wait_durable(600)
    wait_for_keepers()


@pytest.mark.filterwarnings("ignore::holdfast.errors.SaveWarning")
@pytest.mark.usefixtures("quick")
def test_close_does_not_wait_for_a_stopped_keeper(tmp_path: Path) -> None:
    ckpt = make_checkpointer(tmp_path / "home", {"x": torch.ones(3)})
    ckpt.save(1).wait_durable()
    psutil.Process(pid_of(ckpt)).suspend()
    ckpt.close()
    wait_for_keepers()


def test_a_keeper_that_starts_slowly_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Python itself may take longer to start than a keeper may be silent."""
    monkeypatch.setattr(child_process, "_CHECK_S", 0.01)
    monkeypatch.setattr(child_process, "_MAX_START_CHECKS", 10**9)
    go = tmp_path / "go"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nwhile not os.path.exists({str(go)!r}): pass\n"  # as it waits for a processor
    )
    pings: list[Ping] = []

    def ping() -> Ping:
        pings.append(Ping())
        return pings[-1]

    monkeypatch.setattr(child_process, "Ping", ping)
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
            save = ckpt.save(1)
        first = pid_of(ckpt)
        wait_until(lambda: len(pings) > 3 * child_process._MAX_SILENT_CHECKS)
        monkeypatch.setattr(child_process, "_CHECK_S", 1.0)  # once started, it may be silent for 20
        go.touch()
        save.wait_durable(600)
        assert pid_of(ckpt) == first


@pytest.mark.usefixtures("endless_patience")
def test_a_slow_keeper_responds_during_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a slow disk does not look like a frozen process."""
    monkeypatch.setattr(child_process, "_CHECK_S", 0.05)
    received: list[object] = []

    def receive(end: socket.socket, *, receive: Any = packets.receive) -> Any:
        packet = receive(end)
        received.append(packet[0])
        return packet

    monkeypatch.setattr(packets, "receive", receive)
    with make_checkpointer(
        holdfast.Home(tmp_path / "home", bandwidth="4MB"), {"x": torch.ones(2_000_000)}
    ) as ckpt:
        ckpt.save(1).wait_durable(600)
        received.clear()  # in its first seconds, it only started
        ckpt.save(2).wait_durable(600)
        assert Pong() in received[: received.index(SaveReached(2, "persisted"))]


def test_messages_without_room_are_sent_later_in_order_and_with_their_descriptors() -> None:
    ours, theirs = packets.make_pair()
    outbox, sent = Outbox(ours), []
    with Path(os.devnull).open() as file:
        for number in range(1000):
            outbox.send(
                RecordEvent("x", number, 0.0),
                (file.fileno(),) if number % 100 == 0 else (),
                on_sent=lambda: sent.append(1),
            )
    assert outbox, "its socket has no room for so many"
    assert 0 < len(sent) < 1000, "messages without room are not called sent"
    for number in range(1000):
        message, fds = packets.receive(theirs)
        assert message == RecordEvent("x", number, 0.0)
        assert len(fds) == (number % 100 == 0)
        for fd in fds:
            os.close(fd)
    outbox.close()
    ours.close()
    theirs.close()


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


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, RetryLater), (errno.EROFS, Denied), (errno.EACCES, Denied)]
)
def test_a_runtime_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[HoldfastError]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "mkstemp", refuse)
            with pytest.raises(kind, match="HOLDFAST_RUNTIME_DIR"):
                ckpt.save(1)
        ckpt.save(2).wait_durable()
    check_saved(tmp_path / "home", 2, {"x": torch.ones(3)})


def test_a_home_may_have_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff\xfe"))
    with make_checkpointer(home, {"x": torch.ones(3)}) as ckpt:
        ckpt.save(1).wait_durable()
    with make_checkpointer(home, {"x": torch.zeros(3)}) as ckpt:
        assert ckpt.restore() == 1
