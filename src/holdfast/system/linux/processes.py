"""Processes as the kernel lists them: parents, orphans, and members of a process group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Runs a command that receives a signal when its parent dies. The parent may have died before prctl.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[2])); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[3], sys.argv[3:])"
)


class ProcessStat(Struct, frozen=True):
    """Facts about a running process. The start time distinguishes it from others with the same pid."""

    parent: int
    session: int
    start: int  # clock ticks since boot
    state: str  # one letter, such as R (running), D (waits for a disk) or T (stopped)


def read_stat(pid: int) -> ProcessStat | None:
    """Return facts about a process, see proc_pid_stat(5); None if it has exited, or is a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return ProcessStat(parent=int(fields[1]), session=int(fields[3]), start=int(fields[19]), state=fields[0])


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has exited."""
    found = read_stat(pid)
    return None if found is None else found.start


def handles_signal(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal."""
    try:
        text = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    return _has_signal(text, "SigCgt:", number)


def threads_blocking(pid: int, number: int) -> frozenset[str]:
    """Return the threads of a process with a blocked or pending signal.

    The kernel blocks a signal in the thread that runs its handler, until the handler returns.

    Source: sigaction(2), without SA_NODEFER; proc(5), `SigBlk`, `SigPnd` and `ShdPnd`.
    """
    found: set[str] = set()
    for path in (_PROC / str(pid) / "task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended
            text = path.read_text()
            if any(_has_signal(text, mask, number) for mask in ("SigBlk:", "SigPnd:", "ShdPnd:")):
                found.add(path.parent.name)
    return frozenset(found)


def _has_signal(status: str, mask: str, number: int) -> bool:
    line = next((line for line in status.splitlines() if line.startswith(mask)), "_ 0")
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def has_threads() -> bool:
    """Return True if this process has more threads than those of OpenBLAS, which starts its own in a fork."""
    mapped = {line.split()[-1] for line in (_PROC / "self/maps").read_text().splitlines()}
    num_libraries = sum("openblas" in path for path in mapped)  # NumPy and SciPy have one each
    num_threads = sum(1 for _ in (_PROC / "self/task").iterdir())
    most = 1 + num_libraries * ((os.cpu_count() or 1) - 1)
    return threading.active_count() > 1 or num_threads > most


def dying_with_parent(command: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Return a command that receives a signal when the thread that starts it ends, see prctl(2)."""
    wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT]
    return [*wrapper, str(os.getpid()), str(int(number)), *command]


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can reap them, see prctl(2)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


_TAIL_LINES = 15


@contextlib.contextmanager
def process_group(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command for the block, and kill its process group at the end. Its output is written to `log`.

    A process that it has started stays only if that has moved to a group of its own, as keepers do.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_of(log: Path) -> str:
    """Return the last lines of a command's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
