"""Agent of a node: runs `setup` and `run` under bash, records the outcome, kills what is left."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS, Unsupported
from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import ContainerFolder, JobFolder, NodeFolder
from holdfast.jobs.node import processes
from holdfast.jobs.node.checks.gate import Admission
from holdfast.jobs.node.containers.lease import ContainerLease
from holdfast.jobs.node.mounts.lease import MountLease, job_environment
from holdfast.jobs.node.mounts.links import enter_private_links
from holdfast.jobs.node.mounts.mount_spec import read_mount_specs
from holdfast.jobs.node.parent_python import find_parent
from holdfast.jobs.node.processes import Process
from holdfast.jobs.node.roles import start_controller
from holdfast.jobs.node.virtual_environment import DEFAULT, NONE, VENV, activate, make_virtual_environment
from holdfast.jobs.node_spec import NodeSpec, reserve_outcome, write_outcome
from holdfast.jobs.outcome import Outcome, Phase, unstarted
from holdfast.jobs.output import log_times
from holdfast.jobs.output.log_times import LogSampler
from holdfast.system.environment import PROGRESS, ended_preempted, find_divergence, find_hang, was_preempted
from holdfast.system.linux import locks
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.processes import adopt_orphans, die_with_parent
from holdfast.system.linux.wakeup_pipe import wake

_DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TOLD_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a trainer may have received with its shell, and may handle."""
_CANNOT_START = 126
_UNFIT = 1
_LOOK_S = 1.0  # interval for checking the processes that the node needs


def serve(folder: NodeFolder, *, replaces_controller: bool) -> None:
    """Run the node's commands. The caller holds the node's lock.

    Args:
        replaces_controller: start a new controller on this machine when the job's has died.

    Blocks: as long as the node's commands run.
    """
    for number in _DEAF_TO:
        # A handler and not SIG_IGN, which child processes would inherit.
        signal.signal(number, lambda *_: None)
    adopt_orphans()
    plan = NodeSpec.read(folder.plan)
    reserve_outcome(folder.ended)
    me = processes.find(os.getpid())
    assert me is not None
    write_atomic(folder.pid, f"{me.pid} {me.start}")
    wake(Path(plan.wakeup))
    job = JobFolder(folder.path.parents[2])
    mounts = JobFolder(Path(plan.scratch)) if plan.scratch else job
    watch = PeerWatch(job, mounts, replaces_controller=replaces_controller)
    with Path(plan.log).open("ab", buffering=0) as log:
        if read_mount_specs(watch.mounts):
            watch.lease = MountLease(
                watch.mounts.attempt(int(folder.path.parent.name)),
                Path(plan.log),
                lambda: _mounter_environment(plan, job),
            )
        if (container := _container_folder(job, folder)) is not None:
            watch.container = ContainerLease(folder.path.parent, container, Path(plan.log))
        limit = dict(plan.environment).get(log_times.LIMIT, log_times.DEFAULT)
        watch.sampler = LogSampler(Path(plan.log), log.fileno(), limit)
        os.write(log.fileno(), f"{plan.headline}\n".encode())
        admission = Admission(plan, job, folder, log.fileno(), is_contained=watch.container is not None)
        outcome = _work(plan, folder, log.fileno(), watch, admission)
        watch.sampler.poll()
    write_outcome(folder.ended, outcome)
    wake(Path(plan.wakeup))
    watch.replace_controller()  # no process would do that once this one has exited


class PeerWatch:
    """Watch of the processes that a node needs, and of its log.

    Args:
        mounts: folder with the job's mounts: its own, or its scratch folder on this machine.
        replaces_controller: see `serve`.
    """

    def __init__(self, job: JobFolder, mounts: JobFolder, *, replaces_controller: bool) -> None:
        self.job, self.mounts = job, mounts
        self._replaces_controller = replaces_controller
        self.lease: MountLease | None = None
        self.container: ContainerLease | None = None
        self.sampler: LogSampler | None = None

    def poll(self) -> None:
        """Replace a dead controller, mounter or warden, and record the size of the log."""
        self.replace_controller()
        for lease in (self.lease, self.container):
            if lease is not None:
                lease.poll()
        if self.sampler is not None:
            self.sampler.poll()

    def replace_controller(self) -> None:
        """Replace a dead controller."""
        if self._replaces_controller and not locks.is_held(self.job.lock):
            start_controller(self.job)


def _container_folder(job: JobFolder, node: NodeFolder) -> ContainerFolder | None:
    """Return the files of the node's container, or None for a job without image."""
    if node.container.image.exists():
        return node.container
    return job.container(int(node.path.name)) if job.image.exists() else None


def _mounter_environment(plan: NodeSpec, job: JobFolder) -> dict[str, str]:
    if not plan.scratch:
        return job_environment(job)
    return {name: value for name, value in plan.environment.items() if name != TAG}


def _work(plan: NodeSpec, folder: NodeFolder, log: int, watch: PeerWatch, admission: Admission) -> Outcome:
    for lease in (watch.lease, watch.container):
        if lease is not None and (why := lease.wait_until_ready(watch.poll)):
            return _cannot_start(why, log)
    if plan.venv is not None and (why := _prepare_venv(plan, Path(plan.venv), log)):
        return _cannot_start(why, log)
    if why := admission.refusal(watch.poll):
        return Outcome(Phase.SETUP, code=_UNFIT, unfit=why)
    if plan.setup is not None:
        outcome = _shell(plan, Phase.SETUP, log, watch)
        if not outcome.is_success:
            return outcome
        Path(plan.set_up).touch()
        if watch.container is not None and (why := watch.container.wait_until_ready(watch.poll)):
            return _cannot_start(why, log)
    folder.running.touch()
    wake(Path(plan.wakeup))
    return _shell(plan, Phase.RUN, log, watch)


def _cannot_start(why: str, log: int) -> Outcome:
    os.write(log, f"holdfast: the job cannot start: {why}\n".encode())
    return unstarted(why)


def _prepare_venv(plan: NodeSpec, folder: Path, log: int) -> str:
    """Make the virtual environment of the node, unless it has no Python. Return why that failed, or ""."""
    wanted = dict(plan.environment).get(VENV, DEFAULT)
    if wanted.strip().lower() != DEFAULT:
        line = f"{VENV} is {wanted!r:.100}, expected {DEFAULT} or {NONE}. It is taken for {DEFAULT}."
        os.write(log, f"holdfast: {line}\n".encode())
    if plan.setup is None and folder.exists():  # an environment that `setup` has not completed is replaced
        return ""
    try:
        parent = find_parent(plan.environment, Path(plan.workdir))
        if parent is not None:
            make_virtual_environment(folder, parent)
    except Unsupported as error:
        line = f"this job has no virtual environment of its own: {error}"
        os.write(log, f"holdfast: {line}\n".encode())
    except OSError as error:
        return f"its virtual environment cannot be made: {error}"
    return ""


def _shell(plan: NodeSpec, phase: Phase, log: int, watch: PeerWatch) -> Outcome:
    """Run a script, and kill what it has left behind."""
    progress = Path(dict(plan.environment).get(PROGRESS, os.devnull))
    begin = progress.stat().st_size if progress.exists() else 0
    pid = os.fork()
    if pid == 0:
        _become_shell(plan, phase, log, watch)
    orphans = _Orphans(lambda: ended_preempted(progress, after=begin))
    outcome = _outcome(phase, _wait_for(pid, watch, orphans))
    if outcome.is_failed_command and was_preempted(progress, after=begin):
        outcome = Outcome(phase, code=PREEMPTED_STATUS)  # torchrun, for example, exits with 1
    if outcome.is_success and ended_preempted(progress, after=begin):
        outcome = Outcome(phase, code=PREEMPTED_STATUS)  # the status of a pipe, for example, is that of tee
    if not outcome.is_success and (place := find_hang(progress, after=begin)) is not None:
        outcome = Outcome(phase, code=HUNG_STATUS, hung=place)
    if not outcome.is_success and (reason := find_divergence(progress, after=begin)) is not None:
        outcome = Outcome(phase, code=outcome.code, killed_by=outcome.killed_by, diverged=reason)
    if _may_still_save(outcome, Path(plan.notice)):
        orphans.end(None)
        processes.wait_exited(_rest(), plan.grace_s)
    _sweep()
    return outcome


def _become_shell(plan: NodeSpec, phase: Phase, log: int, watch: PeerWatch) -> None:
    """Replace this new process with bash. Never returns."""
    try:
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so by all programs that it starts
            signal.signal(ignored, signal.SIG_DFL)
        # Without the agent, the outcome would be lost.
        die_with_parent()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        script = plan.setup if phase is Phase.SETUP else plan.run
        environment = plan.setup_environment if phase is Phase.SETUP else plan.environment
        if watch.container is not None:
            watch.container.join()
            environment = {**watch.container.environment, **environment}
        else:
            enter_private_links(watch.mounts)
        if plan.venv is not None and Path(plan.venv).is_dir():
            environment = activate(environment, plan.venv)
        os.chdir(plan.workdir)
        _exec_bash(str(script), environment)
    except (OSError, ValueError) as error:
        os.write(2, f"holdfast: cannot start bash in {plan.workdir}: {error}\n".encode())
    finally:
        os._exit(_CANNOT_START)


def _exec_bash(script: str, environment: Mapping[str, str]) -> None:
    """Replace this process with bash. Imports nothing, as it may be in a container."""
    names = [f"{folder}/bash" for folder in environment.get("PATH", os.defpath).split(":")]
    for name in names:
        if os.access(name, os.X_OK):
            os.execve(name, ["bash", script], dict(environment))
    raise FileNotFoundError(errno.ENOENT, "not found on the PATH", "bash")


class _Orphans:
    """Children of trainers that have exited after a preemption. They may keep a pipe open."""

    def __init__(self, is_preempted: Callable[[], bool]) -> None:
        self._is_preempted = is_preempted
        self._signalled: set[Process] = set()

    def end(self, shell: int | None) -> None:
        """Send SIGTERM to each, once. One that handles it may still save."""
        if not self._is_preempted():
            return
        for one in processes.children(os.getpid()):
            if one.pid != shell and not one.exits_by_itself and one not in self._signalled:
                self._signalled.add(one)
                processes.send(one, signal.SIGTERM)


def _wait_for(pid: int, watch: PeerWatch, orphans: _Orphans) -> int:
    """Return the wait status of the shell. Reaps adopted children."""
    fd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        while not poll.poll(_LOOK_S * 1000):
            _reap_others(pid)
            watch.poll()
            orphans.end(pid)
    finally:
        os.close(fd)
    return os.waitpid(pid, 0)[1]


def _reap_others(pid: int) -> None:
    """Reap all children that have exited, except the shell."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != pid:
        os.waitpid(ended.si_pid, 0)


def _outcome(phase: Phase, status: int) -> Outcome:
    if os.WIFSIGNALED(status):
        return Outcome(phase, killed_by=os.WTERMSIG(status))
    return Outcome(phase, code=os.WEXITSTATUS(status))


def _may_still_save(outcome: Outcome, notice: Path) -> bool:
    """Return True if the shell exited before its children, which may be saving."""
    if outcome.is_success:
        return False
    if outcome.killed_by is not None:
        return outcome.killed_by in _TOLD_BY or notice.exists()
    return outcome.is_preempted or outcome.is_hung or notice.exists()


def _rest() -> list[Process]:
    """Return what is left of the node, except keepers and uploaders, which exit by themselves."""
    return [
        one for one in processes.descendants(os.getpid(), processes.snapshot()) if not one.exits_by_itself
    ]


def _sweep() -> None:
    """Kill what is left of the node, repeatedly, as a process may have started others."""
    deadline = time.monotonic() + 60
    while (rest := _rest()) and time.monotonic() < deadline:
        processes.kill(rest)
        processes.reap()
