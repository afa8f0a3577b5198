"""Processes of a node: found by their tree and tag, distinguished from others, killed reliably."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from holdfast.jobs.environment import TAG, tag
from holdfast.system.linux.processes import handles_signal, read_stat

_PROC = Path("/proc")
ROLES, AGENT = "holdfast.jobs", "agent"
"""Module of the processes of all roles, and the only role that belongs to a node."""
CONTAINER_PREFIX = b"holdfast-"  # beginning of the names of containers of jobs
_ROUND_S = 5.0  # time for killed processes to disappear before they are searched for again


class Process(Struct, frozen=True):
    """Process in the kernel's table, identified by pid and start time."""

    pid: int
    parent: int
    session: int
    start: int  # clock ticks since boot

    @property
    def is_keeper(self) -> bool:
        """True if it is a Holdfast keeper, which may still write staged saves."""
        return b"holdfast.checkpoint.keeper" in self._words

    @property
    def exits_by_itself(self) -> bool:
        """True for a keeper or uploader, which exits when its work is done."""
        return self.is_keeper or {b"holdfast.jobs.writeback", b"--config"} <= set(self._words)

    @property
    def is_servant(self) -> bool:
        """True for a process of a role that does not belong to a node, such as a controller or a mounter."""
        # A controller below a node belongs to a job launched from this one, or has replaced this job's own.
        words = self._words
        if ROLES.encode() in words:
            return AGENT.encode() not in words
        if b"holdfast.watch.standby" in words:  # of the machine, for the next attempt
            return True
        # podman's process beside a container of a job outlives attempts.
        is_conmon = bool(words) and words[0].endswith(b"conmon")
        return is_conmon and any(word.startswith(CONTAINER_PREFIX) for word in words[1:])

    @property
    def _words(self) -> list[bytes]:
        try:
            return (_PROC / str(self.pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return []


def find(pid: int) -> Process | None:
    """Return a running process, or None if it has exited."""
    found = read_stat(pid)
    return None if found is None else Process(pid, found.parent, found.session, found.start)


def is_running(pid: int, start: int) -> bool:
    """Return True if a process of this pid and start time is running."""
    found = find(pid)
    return found is not None and found.start == start


def snapshot() -> dict[int, Process]:
    """Return all processes that this user can see."""
    pids = (int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdecimal())
    return {pid: found for pid in pids if (found := find(pid)) is not None}


def reap() -> None:
    """Reap all children that have exited."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants(root: int, table: dict[int, Process]) -> list[Process]:
    """Return the descendants of a process, parents before children, without servants and theirs."""
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


def rest(*, with_keepers: bool = False) -> list[Process]:
    """Return the descendants of this process, by default without keepers and uploaders, which exit alone."""
    found = descendants(os.getpid(), snapshot())
    return [one for one in found if with_keepers or not one.exits_by_itself]


def tagged(mark: str, table: dict[int, Process]) -> list[Process]:
    """Return the processes with a tag of this prefix, their descendants and their sessions."""
    prefix = f"{TAG}={mark}".encode()
    own = [process for process in table.values() if _has(process.pid, prefix)]
    sessions = {process.session for process in own}
    found = {process.pid: process for process in table.values() if process.session in sessions}
    for process in own:
        found[process.pid] = process
        found.update((child.pid, child) for child in descendants(process.pid, table))
    return list(found.values())


def _has(pid: int, prefix: bytes) -> bool:
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False  # exited, or another user's
    return data.startswith(prefix) or b"\0" + prefix in data


def of_role(name: str, folder: Path) -> list[Process]:
    """Return the running processes of a role in a folder."""
    wanted = {ROLES.encode(), name.encode(), os.fsencode(folder)}
    return [process for process in snapshot().values() if wanted <= set(process._words)]


def topmost_handlers(root: int) -> list[Process]:
    """Return the topmost descendants of a process that handle SIGTERM."""
    table = snapshot()
    found: list[Process] = []
    covered = set()
    for process in descendants(root, table):  # parents come first
        if process.parent in covered:
            covered.add(process.pid)
        elif handles_signal(process.pid, signal.SIGTERM) and not process.exits_by_itself:
            found.append(process)
            covered.add(process.pid)
    return found


def send(process: Process, number: int) -> bool:
    """Send a signal, unless the pid belongs to another process now. Return True if it was sent."""
    fd = open_pidfd(process)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def open_pidfd(process: Process) -> int | None:
    """Return a descriptor that becomes readable when a process exits, or None if it has exited."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if is_running(process.pid, process.start):
        return fd
    os.close(fd)
    return None


def wait_exited(processes: Iterable[Process], timeout_s: float) -> bool:
    """Wait until all processes have exited. Return False if the time runs out."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        left = 0
        for process in processes:
            if (fd := open_pidfd(process)) is not None:
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


def end_other_attempts(task_id: str, attempt: int | None) -> None:
    """Kill all processes of a job on this machine except those of one attempt, and keepers.

    So two attempts never run at once. Slurm leaves nothing of an earlier one if it tracks processes by
    cgroups. Otherwise, and here, some may outlive a killed runner or controller.
    """
    table = snapshot()
    kept = () if attempt is None else tagged(tag(task_id, attempt), table)
    own = {os.getpid(), *(process.pid for process in kept)}
    found = [*tagged(tag(task_id), table), *descendants(os.getpid(), table)]
    kill([process for process in found if process.pid not in own and not process.exits_by_itself])


def kill(processes: list[Process]) -> None:
    """Kill processes with SIGKILL, and wait until they are gone.

    Blocks: until the kernel has ended them, at most 5 s. The next call handles what is left.
    """
    for process in processes:
        send(process, signal.SIGKILL)
    wait_exited(processes, _ROUND_S)
