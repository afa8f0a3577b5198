"""Capture of what a process is doing: its state, and the stacks that its own signal handler writes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.system.linux.locks import try_flock
from holdfast.system.linux.processes import handles_signal, start_time, threads_blocking
from holdfast.watch.hang.handlers import STACKS_SIGNAL
from holdfast.watch.hang.py_spy import read_stacks
from holdfast.watch.hang.stacks import Thread, parse_stacks

MAX_WORKERS = 8
"""Child processes whose stacks are captured, such as workers of data loaders."""
_LIMIT_S = 3.0
"""Time that a process may take to write its stacks."""
_QUIET_S = 0.1
"""Time without growth after which the stacks may be complete."""
_LOOK_S = 0.01
_OTHERS_S = 45.0
"""Time to wait for other captures of the same process, which may be stopped themselves."""
_MAX_BYTES = 1 << 20

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped by a debugger",
}


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """Threads of a process, and its state.

    Attributes:
        pid: process id.
        state: "running", "waiting", "waiting for a device", "stopped", "stopped by a debugger" or "gone".
        threads: empty if the process could not write them.
    """

    pid: int
    state: str
    threads: tuple[Thread, ...]


def capture(pid: int, stacks_fd: int) -> tuple[ProcessStacks, tuple[ProcessStacks, ...]]:
    """Return the stacks of a trainer, and of its workers with an inherited handler.

    Args:
        pid: process id of the trainer.
        stacks_fd: the trainer's descriptor of the file that receives its stacks; -1 without one.

    Blocks: at most 3 s per process, 15 s for one that py-spy reads, and 45 s for other captures.
    """
    try:
        file = os.open(f"/proc/{pid}/fd/{stacks_fd}", os.O_RDONLY | os.O_CLOEXEC) if stacks_fd >= 0 else -1
    except OSError:
        file = -1
    if file < 0:
        return ProcessStacks(pid, read_state(pid), read_stacks(pid)), ()
    try:
        if not _locked_in_time(file):
            return ProcessStacks(pid, read_state(pid), ()), ()
        own = ProcessStacks(pid, read_state(pid), _dump(pid, file) or read_stacks(pid))
        workers = [
            ProcessStacks(child, read_state(child), _dump(child, file))
            for child, _ in zip(_children(pid), range(MAX_WORKERS), strict=False)
            if _is_same_file(child, stacks_fd, file)
        ]
        return own, tuple(workers)
    finally:
        os.close(file)


def _locked_in_time(file: int) -> bool:
    """Lock the file of a process's stacks, as those of two captures must not alternate."""
    deadline_s = time.monotonic() + _OTHERS_S
    while not (is_locked := try_flock(file)) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return is_locked


def read_state(pid: int) -> str:
    """Return the state of a process as a word."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "gone"
    return _STATES.get(text.rpartition(")")[2].split()[0], "gone")


def _dump(pid: int, file: int) -> tuple[Thread, ...]:
    """Have a process write its stacks into a file that it shares, and return them."""
    born, before = start_time(pid), os.fstat(file).st_size
    if born is None or not handles_signal(pid, STACKS_SIGNAL) or read_state(pid).startswith("stopped"):
        return ()
    blocked = threads_blocking(pid, STACKS_SIGNAL)
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return ()
    _wait_written(file, before, lambda: threads_blocking(pid, STACKS_SIGNAL) <= blocked)
    if start_time(pid) != born:
        return ()
    return parse_stacks(os.pread(file, _MAX_BYTES, before).decode(errors="replace"))


def _wait_written(file: int, before: int, has_returned: Callable[[], bool]) -> None:
    """Wait until a handler that writes into a file has returned. On a busy machine it may pause for long."""
    deadline_s, size, grown_s = time.monotonic() + _LIMIT_S, before, time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        if (found := os.fstat(file).st_size) != size:
            size, grown_s = found, now_s
        elif size > before and now_s - grown_s >= _QUIET_S and has_returned():
            return
        time.sleep(_LOOK_S)


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            words = task.read_text().split()
        except OSError:
            continue
        yield from map(int, words)


def _is_same_file(pid: int, fd: int, file: int) -> bool:
    try:
        return os.path.samestat(Path(f"/proc/{pid}/fd/{fd}").stat(), os.fstat(file))
    except OSError:
        return False


def end_process(pid: int, number: int, *, limit_s: float) -> None:
    """End a process with its exit handler, and after a while with SIGKILL.

    Blocks: until it has exited, at most `limit_s` and as long again.
    """
    born = start_time(pid)
    for one in (number, signal.SIGKILL):
        if one == signal.SIGKILL or handles_signal(pid, one):
            try:
                os.kill(pid, one)
                os.kill(pid, signal.SIGCONT)  # a stopped process handles no signal
            except OSError:
                return
        deadline_s = time.monotonic() + limit_s
        while born is not None and start_time(pid) == born and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        if start_time(pid) != born:
            return
