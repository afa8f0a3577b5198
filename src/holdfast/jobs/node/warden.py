"""The warden of a node: runs `setup` and `run` under bash, tells how they ended, leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from pathlib import Path

from holdfast.errors import PREEMPTED_STATUS
from holdfast.jobs.node import locks, processes
from holdfast.jobs.node.bell import ring
from holdfast.jobs.node.folder import JobFolder, NodeFolder
from holdfast.jobs.node.mounts.hold import Hold
from holdfast.jobs.node.mounts.supply import read_supplies
from holdfast.jobs.node.plan import Plan, write_outcome, write_whole
from holdfast.jobs.node.processes import Process
from holdfast.jobs.node.spawning import look_after
from holdfast.jobs.outcome import Outcome, Phase

_PR_SET_PDEATHSIG = 1
_DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TOLD_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a trainer may have got with its shell, and has a handler for."""
_CANNOT_START = 126
_NO_MOUNTS = 1
_LOOK_S = 1.0
"""Between two looks whether those live who are needed beside the node."""


def serve(folder: NodeFolder, *, replaces_controller: bool) -> None:
    """Do what the plan says; the caller holds the node's lock.

    Args:
        folder: of the node.
        replaces_controller: start another controller of this machine when the job's is gone.

    Blocks: as long as the node's commands run.
    """
    for number in _DEAF_TO:
        # A handler and not SIG_IGN: what is ignored stays ignored in the commands that we start.
        signal.signal(number, lambda *_: None)
    processes.inherit_orphans()
    plan = Plan.read(folder.plan)
    me = processes.look_up(os.getpid())
    assert me is not None
    write_whole(folder.pid, f"{me.pid} {me.start}")
    ring(Path(plan.bell))
    job = JobFolder(folder.path.parents[2])
    watch = Watch(job, replaces_controller=replaces_controller)
    with Path(plan.log).open("ab", buffering=0) as log:
        if read_supplies(job):
            watch.hold = Hold(folder.path.parent, Path(plan.log))
        outcome = _work(plan, folder, log.fileno(), watch)
    write_outcome(folder.ended, outcome)
    ring(Path(plan.bell))


class Watch:
    """What a warden looks after beside its node, while that works: that others who are needed live.

    Args:
        job: folder of the job.
        replaces_controller: as for `serve`.
    """

    def __init__(self, job: JobFolder, *, replaces_controller: bool) -> None:
        self._job = job
        self._replaces_controller = replaces_controller
        self.hold: Hold | None = None

    def look(self) -> None:
        """Have another controller if the job's was killed, and another porter."""
        if self._replaces_controller and not locks.is_held(self._job.lock):
            look_after(self._job)
        if self.hold is not None:
            self.hold.look()


def _work(plan: Plan, folder: NodeFolder, log: int, watch: Watch) -> Outcome:
    os.write(log, f"{plan.headline}\n".encode())
    if watch.hold is not None and (why := watch.hold.wait_until_there(watch.look)):
        os.write(log, f"holdfast: the job cannot begin: {why}\n".encode())
        return Outcome(Phase.SETUP, code=_NO_MOUNTS)
    if plan.setup is not None:
        outcome = _shell(plan, Phase.SETUP, log, watch)
        if not outcome.is_success:
            return outcome
        Path(plan.set_up).touch()
    folder.running.touch()
    ring(Path(plan.bell))
    return _shell(plan, Phase.RUN, log, watch)


def _shell(plan: Plan, phase: Phase, log: int, watch: Watch) -> Outcome:
    """Run a script to its end, and end what it has left behind."""
    pid = os.fork()
    if pid == 0:
        _become_shell(plan, phase, log)
    outcome = _outcome(phase, _wait_for(pid, watch))
    if _may_still_save(outcome, Path(plan.notice)):
        _wait_for_rest(plan.grace_s)
    _sweep()
    return outcome


def _become_shell(plan: Plan, phase: Phase, log: int) -> None:
    """In the new process: become bash. Never returns."""
    try:
        # Without us nobody would know how it ended.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(plan.workdir)
        script = plan.setup if phase is Phase.SETUP else plan.run
        environment = plan.setup_environment if phase is Phase.SETUP else plan.environment
        os.execvpe("bash", ["bash", str(script)], dict(environment))
    except OSError as error:
        os.write(2, f"holdfast: bash could not be started in {plan.workdir}: {error}\n".encode())
    finally:
        os._exit(_CANNOT_START)


def _wait_for(pid: int, watch: Watch) -> int:
    """Wait status of the shell; children that we have inherited are buried on the way."""
    fd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        while not poll.poll(_LOOK_S * 1000):
            _bury_others(pid)
            watch.look()
    finally:
        os.close(fd)
    return os.waitpid(pid, 0)[1]


def _bury_others(pid: int) -> None:
    """Take note of all children that have ended, but of the shell, whose status is still to be read."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != pid:
        os.waitpid(ended.si_pid, 0)


def _outcome(phase: Phase, status: int) -> Outcome:
    if os.WIFSIGNALED(status):
        return Outcome(phase, killed_by=os.WTERMSIG(status))
    return Outcome(phase, code=os.WEXITSTATUS(status))


def _may_still_save(outcome: Outcome, notice: Path) -> bool:
    """True if the shell went before those that it should have waited for: they may be at their last save."""
    if outcome.is_success:
        return False
    return outcome.killed_by in _TOLD_BY or outcome.code == PREEMPTED_STATUS or notice.exists()


def _wait_for_rest(timeout_s: float) -> None:
    processes.wait_gone(_rest(), timeout_s)


def _rest() -> list[Process]:
    """What is left of the node, without keepers and uploaders, which end by themselves."""
    return [one for one in processes.below(os.getpid(), processes.living()) if not one.ends_by_itself]


def _sweep() -> None:
    """End the rest of the node; again, since a process may have made others before it was ended."""
    deadline = time.monotonic() + 60
    while (rest := _rest()) and time.monotonic() < deadline:
        processes.end(rest)
        processes.bury()
