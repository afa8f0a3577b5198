"""Troubles of a job of the local engine, caused for real: kills, stops, notices, full disks, damage."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.jobs.engine import Job
from holdfast.jobs.environment import tag
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.node import processes
from holdfast.jobs.node.processes import AGENT, Process

from .schedule import Trouble

LEAD_S = 5.0
"""Notice before a preemption. Not scaled, as the time of a save is not either."""
FULL_S = 1.0
"""Time for which writes fail before the process is killed."""
FULL_BYTES = 1 << 20
"""Size up to which files can still grow on the full disk, which is enough for logs."""
LIMIT_S = 600.0
_POLL_S = 0.005


class Troubles:
    """Everything that can happen to a job.

    Args:
        script: name of the training script, which is in the command line of the ranks.
        folder: folder of the training, with its checkpoints in `home` and a file `steps-ATTEMPT` each.
    """

    def __init__(self, engine: LocalEngine, job: Job, *, script: str, folder: Path) -> None:
        self._engine, self._job, self._script, self._folder = engine, job, script, folder

    def cause(self, trouble: Trouble, node: int) -> None:
        """Cause a trouble on a node."""
        causes: dict[Trouble, Callable[[int], None]] = {
            Trouble.NODE: self.lose_node,
            Trouble.RANK: self.kill_rank,
            Trouble.HANG: self.stop_rank,
            Trouble.NOTICE: self.send_notice,
            Trouble.DISK: self.fill_disk,
            Trouble.DAMAGE: self.damage,
        }
        causes[trouble](node)

    def lose_node(self, node: int) -> None:
        """Kill a node's agent and everything below it, as the loss of a machine does."""
        folder = job_folder(state_dir(), self._job.id).node(self._engine.job(self._job.id).attempt, node)
        wait(lambda: processes.of_role(AGENT, folder.path), f"the agent of node {node}")
        table = processes.snapshot()
        for agent in processes.of_role(AGENT, folder.path):
            processes.kill([agent, *processes.descendants(agent.pid, table)])

    def kill_rank(self, node: int) -> None:
        """Kill a rank; its keeper stays."""
        self._signal(node, signal.SIGKILL)

    def stop_rank(self, node: int) -> None:
        """Stop a rank in a step, which then hangs for all others."""
        wait(self._is_training, "a step of the attempt")
        self._signal(node, signal.SIGSTOP)

    def send_notice(self, node: int) -> None:
        """Send the notice of a preemption, unless the job has no process."""
        with contextlib.suppress(HoldfastError):
            self._engine.preempt(self._job.id, lead_s=LEAD_S)

    def fill_disk(self, node: int) -> None:
        """Let all large writes of the job fail for a while, then kill a rank."""
        for one in processes.tagged(tag(self._job.task_id), processes.snapshot()):
            with contextlib.suppress(OSError):
                resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
        time.sleep(FULL_S)
        self.kill_rank(node)

    def damage(self, node: int) -> None:
        """Lose a node, and half of the largest file of the newest checkpoint."""
        self.lose_node(node)
        found = [path for path in (self._folder / "home").rglob("*") if path.is_file()]
        large = [path for path in found if path.stat().st_size > FULL_BYTES]
        if large:
            newest = max(large, key=lambda path: path.stat().st_mtime_ns)
            os.truncate(newest, newest.stat().st_size // 2)

    def _is_training(self) -> bool:
        path = self._folder / f"steps-{self._engine.job(self._job.id).attempt}"
        return path.exists() and path.stat().st_size > 0

    def _signal(self, node: int, number: int) -> None:
        """Send a signal to the rank of a node, once it has one."""
        found: list[Process] = []

        def is_there() -> bool:
            attempt = self._engine.job(self._job.id).attempt
            own = processes.tagged(tag(self._job.task_id, attempt, node), processes.snapshot())
            found[:] = [one for one in own if self._is_rank(one)]
            return bool(found)

        wait(is_there, f"the rank of node {node}")
        for one in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)

    def _is_rank(self, process: Process) -> bool:
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return not process.is_keeper and any(word.endswith(self._script.encode()) for word in words)


def wait(what: Callable[[], object], name: str) -> None:
    """Wait until something is true.

    Raises:
        TimeoutError: it was not, for `LIMIT_S`.
    """
    give_up_s = time.monotonic() + LIMIT_S
    while not what():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"waited {LIMIT_S:.0f} s in vain for {name}")
        time.sleep(_POLL_S)
