"""The processes of a node: found by their tree and by their mark, told from strangers, ended for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.jobs.environment import MARK

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_SERVANTS = (
    {b"holdfast.jobs.local", b"controller"},
    {b"holdfast.jobs.node", b"porter"},
    {b"holdfast.jobs.node", b"drainer"},
)
_ROUND_S = 5.0
"""How long killed processes may take to vanish before they are looked for again."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as the kernel tells it; pid and start together are nobody else's."""

    pid: int
    parent: int
    session: int
    start: int  # clock ticks since boot

    @property
    def is_keeper(self) -> bool:
        """True if it is a Holdfast keeper, which may still write what was staged."""
        return b"holdfast.keeper" in self._words

    @property
    def ends_by_itself(self) -> bool:
        """True if it finishes what it was given and then ends: a keeper, the uploader of a mount."""
        return self.is_keeper or {b"holdfast.writeback", b"--config"} <= set(self._words)

    @property
    def is_servant(self) -> bool:
        """True if it looks after a job or after mounts, so that it belongs to no node.

        A controller below a node is of another job, which was launched from within this one, or it took the
        place of this job's.
        """
        words = set(self._words)
        return any(servant <= words for servant in _SERVANTS)

    @property
    def _words(self) -> list[bytes]:
        try:
            return (_PROC / str(self.pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return []

    @property
    def catches_sigterm(self) -> bool:
        """True if it has a handler for SIGTERM: it wants to be told, and does not just die of it."""
        try:
            text = (_PROC / str(self.pid) / "status").read_text()
        except OSError:
            return False
        for line in text.splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
        return False


def look_up(pid: int) -> Process | None:
    """A living process; None if it is gone, or a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]))


def living() -> dict[int, Process]:
    """All processes that this user can see."""
    pids = (int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdecimal())
    return {pid: found for pid in pids if (found := look_up(pid)) is not None}


def inherit_orphans() -> None:
    """From now on what loses its parent below this process becomes its child, and can be found.

    Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury() -> None:
    """Take note of all children that have ended, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def below(root: int, table: dict[int, Process]) -> list[Process]:
    """The descendants of a process, parents before children; not itself, and nothing of servants."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    front = [root]
    while front:
        nearer = [child for pid in front for child in children.get(pid, ()) if not child.is_servant]
        found += nearer
        front = [child.pid for child in nearer]
    return found


def marked(mark: str, table: dict[int, Process]) -> list[Process]:
    """The processes whose environment has a mark that begins so, their descendants and their sessions."""
    prefix = f"{MARK}={mark}".encode()
    own = [process for process in table.values() if _has(process.pid, prefix)]
    sessions = {process.session for process in own}
    found = {process.pid: process for process in table.values() if process.session in sessions}
    for process in own:
        found[process.pid] = process
        found.update((child.pid, child) for child in below(process.pid, table))
    return list(found.values())


def _has(pid: int, prefix: bytes) -> bool:
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False  # gone, or another user's
    return data.startswith(prefix) or b"\0" + prefix in data


def servants(role: str, folder: Path) -> list[Process]:
    """The living processes of `holdfast.jobs.node` that have this role for a folder."""
    wanted = {b"holdfast.jobs.node", role.encode(), os.fsencode(folder)}
    return [process for process in living().values() if wanted <= set(process._words)]


def topmost_catchers(root: int) -> list[Process]:
    """Below a process, those that have a handler for SIGTERM and no ancestor there that has one."""
    table = living()
    found: list[Process] = []
    covered = set()
    for process in below(root, table):  # parents come first
        if process.parent in covered:
            covered.add(process.pid)
        elif process.catches_sigterm and not process.ends_by_itself:
            found.append(process)
            covered.add(process.pid)
    return found


def send(process: Process, number: int) -> bool:
    """Signal this process and no other that has got its pid since; True if it was there."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = look_up(process.pid)
        if now is None or now.start != process.start:
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(processes: Iterable[Process], timeout_s: float) -> bool:
    """Wait until all of them have ended; False if not within the time.

    Blocks: at most `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        left = 0
        for process in processes:
            for fd in _open(process):
                stack.callback(os.close, fd)
                poll.register(fd, select.POLLIN)
                left += 1
        while left:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            for fd, _ in poll.poll(remaining_s * 1000):
                poll.unregister(fd)
                left -= 1
    return True


def _open(process: Process) -> Iterator[int]:
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    now = look_up(process.pid)
    if now is None or now.start != process.start:
        os.close(fd)
        return
    yield fd


def end(processes: list[Process]) -> None:
    """SIGKILL them, and wait until they are gone.

    Blocks: until the kernel has ended them, at most 5 s; one that it cannot end yet is left to the next look.
    """
    for process in processes:
        send(process, signal.SIGKILL)
    wait_gone(processes, _ROUND_S)
