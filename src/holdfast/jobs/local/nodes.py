"""The nodes of one attempt as the controller sees them: started or adopted, told, ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.jobs.environment import mark
from holdfast.jobs.node import locks, processes
from holdfast.jobs.node.folder import JobFolder, NodeFolder
from holdfast.jobs.node.mounts.hold import STOPPED
from holdfast.jobs.node.plan import Plan, read_outcome
from holdfast.jobs.node.processes import Process
from holdfast.jobs.node.spawning import spawn
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.notice.file import write_notice
from holdfast.notice.preemption import Notice

_SWEEP_S = 60.0
"""How long processes that do not vanish are killed again and again before that is an error."""


@dataclasses.dataclass(slots=True)
class _Node:
    folder: NodeFolder
    warden: Process | None = None  # None: gone, or not yet known
    fd: int | None = None  # pidfd of the warden
    outcome: Outcome | None = None


class Nodes:
    """All nodes of an attempt. Made anew by whoever takes a job over; the folders say what there is.

    Args:
        folder: of the job.
        task_id: of the job.
        attempt: its number.
        num_nodes: how many there are to be.
    """

    def __init__(self, folder: JobFolder, task_id: str, attempt: int, num_nodes: int) -> None:
        self._folder = folder
        self._task_id = task_id
        self._attempt = attempt
        self._nodes = [_Node(folder.node(attempt, rank)) for rank in range(num_nodes)]
        self.is_killed = False
        """We have ended it by force; its wardens will tell so."""

    def close(self) -> None:
        """Watch no more."""
        for node in self._nodes:
            _let_go(node)

    # -- starting --------------------------------------------------------------------------------------------

    def start(self, plans: list[Plan]) -> None:
        """Start the wardens of all nodes that have none yet; what was started before is left alone."""
        for node, plan in zip(self._nodes, plans, strict=True):
            if not node.folder.path.exists():
                node.warden = processes.look_up(_start(node.folder, plan))
                node.fd = _pidfd(node.warden)

    def end_earlier(self) -> None:
        """End whatever is left of this job's other attempts: there must never be two copies.

        Blocks: until they are gone.
        """
        own = mark(self._task_id, self._attempt)
        table = processes.living()
        ours = {process.pid for process in processes.marked(own, table)}
        found = [*processes.marked(mark(self._task_id), table), *processes.below(os.getpid(), table)]
        strays = [
            one for one in found if one.pid not in ours and one.pid != os.getpid() and not one.ends_by_itself
        ]
        if strays:
            processes.end(strays)

    # -- seeing ----------------------------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """Descriptors that become readable when a warden ends."""
        return [node.fd for node in self._nodes if node.fd is not None]

    def look(self, killed_unix_s: float | None) -> None:
        """Find out what has become of each node.

        Args:
            killed_unix_s: when all were to be ended; what failed after that did not do so by itself.

        Raises:
            Internal: an outcome cannot be read.
        """
        for node in self._nodes:
            if node.outcome is None:
                self._look_at(node, killed_unix_s)

    def _look_at(self, node: _Node, killed_unix_s: float | None) -> None:
        is_alive = locks.is_held(node.folder.lock)  # before the outcome is read: it is written under the lock
        if is_alive and node.warden is None:
            node.warden = _warden(node.folder)
            node.fd = _pidfd(node.warden)
        outcome = read_outcome(node.folder.ended)
        if outcome is None and not is_alive:
            outcome = Outcome(_phase(node.folder))
        if outcome is None:
            return
        if not outcome.is_success and not outcome.is_lost and _is_after(node.folder.ended, killed_unix_s):
            outcome = dataclasses.replace(outcome, is_stopped=True)
        node.outcome = outcome
        _let_go(node)

    @property
    def has_unknown(self) -> bool:
        """True if a node's warden lives and has not yet said who it is; it rings when it has."""
        return any(node.outcome is None and node.warden is None for node in self._nodes)

    @property
    def have_run(self) -> bool:
        """True if every node has come to `run`."""
        return all(node.folder.running.exists() for node in self._nodes)

    def outcomes(self) -> Mapping[int, Outcome]:
        """How nodes ended, of those that have."""
        return {rank: node.outcome for rank, node in enumerate(self._nodes) if node.outcome is not None}

    # -- ending ----------------------------------------------------------------------------------------------

    def tell(self, source: str, deadline_unix_s: float) -> int:
        """Give every node the notice: a file, and SIGTERM for those that have a handler; how many do."""
        word = Notice(source, deadline_unix_s=deadline_unix_s)
        for node in self._nodes:
            if node.outcome is None:
                with contextlib.suppress(FileNotFoundError):  # it was never started
                    write_notice(node.folder.notice, word)
        wardens = [one.warden for one in self._nodes if one.warden is not None and one.outcome is None]
        listening = [process for warden in wardens for process in processes.topmost_catchers(warden.pid)]
        return sum(processes.send(process, signal.SIGTERM) for process in listening)

    def kill(self, *, with_keepers: bool) -> None:
        """End all processes of the attempt by force, but not the wardens, which tell of it and go.

        Blocks: until they are gone.
        """
        self.is_killed = True
        with contextlib.suppress(FileNotFoundError):  # nothing was started
            (self._folder.attempt(self._attempt) / STOPPED).touch()  # for those who wait for their mounts
        deadline = time.monotonic() + _SWEEP_S
        while (left := self.left(with_keepers=with_keepers)) and time.monotonic() < deadline:
            processes.end(left)

    def left(self, *, with_keepers: bool = False) -> list[Process]:
        """Processes of the attempt that are there, without wardens; keepers only if asked for."""
        table = processes.living()
        found = {one.pid: one for one in processes.marked(mark(self._task_id, self._attempt), table)}
        wardens = {node.warden.pid for node in self._nodes if node.warden is not None}
        for pid in (*(wardens & table.keys()), os.getpid()):  # what a dead warden had comes to us
            found.update((one.pid, one) for one in processes.below(pid, table))
        return [
            one
            for one in found.values()
            if one.pid not in wardens and one.pid != os.getpid() and (with_keepers or not one.ends_by_itself)
        ]

    def have_keepers(self) -> bool:
        """Whether keepers of the attempt still finish what was staged."""
        return any(one.is_keeper for one in self.left(with_keepers=True))


def _start(folder: NodeFolder, plan: Plan) -> int:
    """Start a warden, and return its pid; it has its lock at once, so none takes it for dead."""
    making = folder.path.with_name(f".{folder.path.name}.{os.getpid()}")
    making.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = NodeFolder(making)
    plan.write(beside.plan)
    lock = locks.take(beside.lock)
    assert lock is not None, "nobody else knows this folder"
    making.rename(folder.path)  # from here on the node is there, locked
    try:
        return spawn("warden", folder.path, log=Path(plan.log), lock=lock)
    finally:
        os.close(lock)


def _warden(folder: NodeFolder) -> Process | None:
    """The living warden of a node; None if it has not said who it is, or is gone."""
    try:
        pid, start = map(int, folder.pid.read_text().split())
    except (FileNotFoundError, ValueError):
        return None
    found = processes.look_up(pid)
    return found if found is not None and found.start == start else None


def _pidfd(warden: Process | None) -> int | None:
    if warden is None:
        return None
    try:
        return os.pidfd_open(warden.pid)
    except OSError:
        return None


def _let_go(node: _Node) -> None:
    if node.fd is not None:
        os.close(node.fd)
        node.fd = None
    if node.warden is not None:
        with contextlib.suppress(ChildProcessError):  # adopted: somebody else buries it
            os.waitpid(node.warden.pid, os.WNOHANG)


def _is_after(path: Path, unix_s: float | None) -> bool:
    """True if a file was written after a moment, as exactly as file systems tell time."""
    return unix_s is not None and path.stat().st_mtime >= unix_s - 0.01


def _phase(folder: NodeFolder) -> Phase:
    return Phase.RUN if folder.running.exists() else Phase.SETUP
