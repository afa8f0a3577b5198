"""Agent of a node: runs `setup` and `run` under bash, records the outcome, kills what is left."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS, Unsupported
from holdfast.jobs.environment import setup_variables
from holdfast.jobs.folder import JobFolder, NodeFolder
from holdfast.jobs.node import processes
from holdfast.jobs.node.checks.gate import start_checks
from holdfast.jobs.node.containers.container import Container
from holdfast.jobs.node.mounts.attempt import Mounts
from holdfast.jobs.node.mounts.mount_records import enter_private_links
from holdfast.jobs.node.processes import Process
from holdfast.jobs.node.roles import Server, start_controller
from holdfast.jobs.node.virtual_environment import (
    DEFAULT,
    NONE,
    VENV,
    activate,
    find_parent,
    make_virtual_environment,
)
from holdfast.jobs.node_spec import NodeSpec, reserve_outcome, write_outcome
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.output import DEFAULT_LOG_LIMIT, LOG_LIMIT, LogSampler
from holdfast.system.environment import PROGRESS, read_progress
from holdfast.system.linux import locks
from holdfast.system.linux.processes import adopt_orphans, die_with_parent
from holdfast.system.linux.wakeup_pipe import wake
from holdfast.watch.standby import with_standby
from holdfast.watch.standby.start.sitecustomize import STANDBY

_DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TOLD_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a trainer may have received with its shell, and may handle."""
_CANNOT_START = 126
_NOT_STARTED = 1
_MAX_WHY = 400  # characters of the reason why commands cannot start
_SWEEP_S = 60.0  # time limit for killing processes that do not disappear
_LOOK_S = 1.0  # interval for checking the processes that the node needs
_SAVE_LOOK_S = 0.2  # the same while processes complete a save


def serve(path: Path) -> None:
    """Run the commands of a node on this machine, and replace a dead controller. The caller holds a lock."""
    for number in _DEAF_TO:
        # A handler and not SIG_IGN, which child processes would inherit.
        signal.signal(number, lambda *_: None)
    adopt_orphans()
    folder = NodeFolder(path)
    plan, job = NodeSpec.read(folder.plan), JobFolder(path.parents[2])

    def replace_controller() -> None:
        if not locks.is_held(job.lock):
            start_controller(job)

    Agent(folder, plan, on_look=replace_controller).run()
    wake(Path(plan.wakeup))
    replace_controller()  # no process would do that once this one has exited


class Agent:
    """Agent of a node, which also watches the processes that the node needs, and its log.

    `on_look` is called at least once a second, and when one of `fds` becomes readable.
    """

    def __init__(
        self,
        folder: NodeFolder,
        plan: NodeSpec,
        *,
        on_look: Callable[[], object],
        fds: Callable[[], Iterable[int]] = tuple,
        mounts: Mounts | None = None,
    ) -> None:
        self._folder, self._plan, self._on_look, self._fds = folder, plan, on_look, fds
        self._attempt = folder.path.parent
        self._job = JobFolder(self._attempt.parents[1])
        log = Path(plan.log)
        self._mounts = mounts or Mounts(self._job, int(self._attempt.name), log=log)
        self._servers: list[Server] = [self._mounts] if self._mounts.specs else []
        self._container: Container | None = None
        if folder.container.image.exists() or self._job.image.exists():
            own = folder.container.image.exists()  # of this attempt only
            files = folder.container if own else self._job.container(int(folder.path.name))
            self._container = Container(self._job, files, log)
            self._servers.append(self._container)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._sampler = LogSampler(log, self._log, plan.environment.get(LOG_LIMIT, DEFAULT_LOG_LIMIT))
        self._is_preempted: Callable[[], bool] = lambda: False  # the newest report of the training
        self._signalled: set[Process] = set()

    def run(self, why_not: str = "") -> Outcome:
        """Run the commands, unless there is a reason why not; return and write how they ended."""
        reserve_outcome(self._folder.ended)
        os.write(self._log, f"{self._plan.headline}\n".encode())
        outcome = self._refuse(why_not) if why_not else self._work()
        os.close(self._log)
        write_outcome(self._folder.ended, outcome)
        return outcome

    def _poll(self) -> None:
        """Replace a dead mounter or warden, record the size of the log, and do what the caller does."""
        self._on_look()
        for server in self._servers:
            server.poll()
        self._sampler.poll()

    def _work(self) -> Outcome:
        """Run the commands once all that they need is ready, and return how they ended."""
        if self._mounts.specs:
            self._mounts.attach()
        is_contained = self._container is not None
        checks = start_checks(self._plan, self._job, self._folder, self._write, is_contained=is_contained)
        try:
            outcome = self._prepare(checks) or self._run_commands()
        finally:
            for server in self._servers:
                server.close()
        self._sampler.poll()
        return outcome

    def _prepare(self, checks: Callable[[Callable[[], None]], str]) -> Outcome | None:
        """Wait for mounts, container and checks of the node. Return why the commands cannot start, if so."""
        if why := self._not_ready(*self._servers) or self._prepare_venv():
            return self._refuse(why)
        if why := checks(self._poll):
            return Outcome(Phase.SETUP, code=_NOT_STARTED, unfit=why)
        return None

    def _not_ready(self, *servers: Server) -> str:
        return next((why for one in servers if (why := one.wait_until_ready(self._attempt, self._poll))), "")

    def _refuse(self, why: str) -> Outcome:
        """Return the outcome of commands that cannot start."""
        self._write(f"the job cannot start: {why}")
        return Outcome(Phase.SETUP, code=_NOT_STARTED, unstarted=why.partition("\n")[0][:_MAX_WHY])

    def _write(self, line: str) -> None:
        os.write(self._log, f"holdfast: {line}\n".encode())

    def _run_commands(self) -> Outcome:
        plan = self._plan
        if plan.setup is not None:
            outcome = self._shell(Phase.SETUP)
            if not outcome.is_success:
                return outcome
            Path(plan.set_up).touch()
            if self._container is not None and (why := self._not_ready(self._container)):
                return self._refuse(why)
        self._folder.running.touch()
        wake(Path(plan.wakeup))
        return self._shell(Phase.RUN)

    def _prepare_venv(self) -> str:
        """Make the virtual environment of the node, unless it has no Python. Return why not, or ""."""
        plan = self._plan
        if plan.venv is None:
            return ""
        wanted = plan.environment.get(VENV, DEFAULT)
        if wanted.strip().lower() != DEFAULT:
            self._write(
                f"{VENV} is {wanted!r:.100}, expected {DEFAULT} or {NONE}. It is taken for {DEFAULT}."
            )
        if plan.setup is None and Path(plan.venv).exists():  # one that `setup` has not completed is replaced
            return ""
        try:
            parent = find_parent(plan.environment, Path(plan.workdir), self._on_look)
            if parent is not None:
                make_virtual_environment(Path(plan.venv), parent)
        except Unsupported as error:
            self._write(f"this job has no virtual environment of its own: {error}")
        except OSError as error:
            return f"its virtual environment cannot be made: {error}"
        return ""

    def _shell(self, phase: Phase) -> Outcome:
        """Run a script, and kill what it has left behind."""
        notice = Path(self._plan.notice)
        progress = Path(self._plan.environment.get(PROGRESS, os.devnull))
        begin = progress.stat().st_size if progress.exists() else 0
        pid = os.fork()
        if pid == 0:
            self._become_shell(phase)
        self._is_preempted = lambda: read_progress(progress, after=begin).is_preempted
        code = os.waitstatus_to_exitcode(self._wait_for(pid))
        outcome = Outcome(phase, code=code) if code >= 0 else Outcome(phase, killed_by=-code)
        reported = read_progress(progress, after=begin)
        if outcome.is_failed_command and reported.was_preempted:
            outcome = Outcome(phase, code=PREEMPTED_STATUS)  # torchrun, for example, exits with 1
        if outcome.is_success and reported.is_preempted:
            outcome = Outcome(phase, code=PREEMPTED_STATUS)  # a pipe, for example, has the status of tee
        if not outcome.is_success and (place := reported.hang) is not None:
            outcome = Outcome(phase, code=HUNG_STATUS, hung=place)
        if not outcome.is_success and (reason := reported.divergence) is not None:
            outcome = Outcome(phase, code=outcome.code, killed_by=outcome.killed_by, diverged=reason)
        if _may_still_save(outcome, notice):
            self._end_orphans()
            saving, deadline = processes.rest(), time.monotonic() + self._plan.grace_s
            while not processes.wait_exited(saving, _SAVE_LOOK_S) and time.monotonic() < deadline:
                self._on_look()
        deadline = time.monotonic() + _SWEEP_S
        while (left := processes.rest()) and time.monotonic() < deadline:  # a process may have started others
            processes.kill(left)
            processes.reap()
        return outcome

    def _end_orphans(self, shell: int | None = None) -> None:
        """Send SIGTERM, once, to the children of trainers that have exited after a preemption."""
        if self._is_preempted():  # they may keep a pipe open; one that handles the signal may still save
            for child in processes.rest():
                if child.parent == os.getpid() and child.pid != shell and child not in self._signalled:
                    self._signalled.add(child)
                    processes.send(child, signal.SIGTERM)

    def _become_shell(self, phase: Phase) -> None:
        """Replace this new process with bash. Never returns."""
        plan = self._plan
        try:
            # Python ignores them, and so would all programs that it starts.
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            # Without the agent, the outcome would be lost.
            die_with_parent()
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._log, 1)
            os.dup2(self._log, 2)
            script, environment = plan.run, plan.environment
            if environment.get(STANDBY):
                environment = with_standby(environment)
            if phase is Phase.SETUP:
                script, environment = str(plan.setup), {**environment, **setup_variables(environment)}
            if self._container is not None:
                self._container.join()
                environment = {**self._container.environment, **environment}
            else:
                enter_private_links(self._mounts.job)
            os.chdir(plan.workdir)
            _exec_bash(script, activate(environment, plan.venv))
        except (OSError, ValueError) as error:
            os.write(2, f"holdfast: cannot start bash in {plan.workdir}: {error}\n".encode())
        finally:
            os._exit(_CANNOT_START)

    def _wait_for(self, pid: int) -> int:
        """Return the wait status of the shell. Reaps adopted children."""
        fd = os.pidfd_open(pid)
        try:
            while fd not in select.select([fd, *self._fds()], [], [], _LOOK_S)[0]:
                ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
                while (child := os.waitid(os.P_ALL, 0, ended)) and child.si_pid != pid:
                    os.waitpid(child.si_pid, 0)
                self._poll()
                self._end_orphans(pid)
        finally:
            os.close(fd)
        return os.waitpid(pid, 0)[1]


def _exec_bash(script: str, environment: Mapping[str, str]) -> None:
    """Replace this process with bash. Imports nothing, as it may be in a container."""
    names = [f"{folder}/bash" for folder in environment.get("PATH", os.defpath).split(":")]
    for name in names:
        if os.access(name, os.X_OK):
            os.execve(name, ["bash", script], dict(environment))
    raise FileNotFoundError(errno.ENOENT, "not found on the PATH", "bash")


def _may_still_save(outcome: Outcome, notice: Path) -> bool:
    """Return True if the shell exited before its children, which may be saving."""
    if outcome.is_success:
        return False
    if outcome.killed_by is not None:
        return outcome.killed_by in _TOLD_BY or notice.exists()
    return outcome.is_preempted or outcome.is_hung or notice.exists()
