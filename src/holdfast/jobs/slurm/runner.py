"""Runner on each node of a Slurm job: starts the agent, and forwards signals and requests to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from holdfast.entry import command
from holdfast.environment import read_integer
from holdfast.jobs.environment import Node, run_environment, setup_environment, tag
from holdfast.jobs.node import processes
from holdfast.jobs.node.folder import JobFolder, NodeFolder
from holdfast.jobs.node.scripts import node_variables
from holdfast.jobs.node.spec import NodeSpec, read_outcome
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.slurm import messages
from holdfast.jobs.slurm.job_files import JobFiles, SubmittedJob
from holdfast.jobs.slurm.messages import Inbox, Message, write
from holdfast.linux.processes import adopt_orphans, die_with_parent
from holdfast.linux.wakeup_pipe import WakeupPipe
from holdfast.notice.file import write_notice
from holdfast.notice.preemption import Notice

KILL_WAIT_S = 30.0
"""Slurm's default time between SIGTERM and SIGKILL, its option KillWait."""
_LOOK_S = 1.0
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def run_node(folder: JobFolder, attempt: int, addresses: list[str]) -> None:
    """Run this node's part of an attempt. Called by srun, once per node.

    Blocks: as long as the node's commands run and keepers finish staged saves.
    """
    runner = _Runner(folder, attempt, addresses)
    try:
        runner.serve()
    finally:
        runner.close()


def sweep(folder: JobFolder, attempt: int | None) -> None:
    """Kill what is left on this node of all attempts except one.

    Slurm leaves nothing if it tracks processes by cgroups. Otherwise some may outlive a killed runner.

    Blocks: until they are gone.
    """
    task_id = JobFiles(folder).read_job().task_id
    table = processes.snapshot()
    kept = () if attempt is None else processes.tagged(tag(task_id, attempt), table)
    own = {process.pid for process in kept}
    found = processes.tagged(tag(task_id), table)
    left = [one for one in found if one.pid not in own and not one.exits_by_itself]
    if left:
        processes.kill(left)


def die_with_runner() -> None:
    """Make the kernel kill this agent, and so its shell, when the runner dies."""
    die_with_parent()
    if os.getppid() == 1:  # the runner died before the call
        os.kill(os.getpid(), signal.SIGKILL)


class _Runner:
    def __init__(self, folder: JobFolder, attempt: int, addresses: list[str]) -> None:
        self._folder, self._attempt = folder, attempt
        self._facts = JobFiles(folder).read_job()
        self._rank = read_integer("SLURM_NODEID", 0)
        num_gpus = read_integer("SLURM_GPUS_ON_NODE", self._facts.num_gpus)
        self._node = NodeFolder(folder.attempt(attempt) / str(self._rank))
        # Not in the job's folder, whose file system may not support pipes.
        self._room = tempfile.TemporaryDirectory(prefix="holdfast-node-")
        bell = Path(self._room.name) / "bell"
        self._wakeup = WakeupPipe(bell)
        self._plan = _plan(self._facts, folder, attempt, self._rank, addresses, num_gpus, str(bell))
        self._inbox = Inbox()
        self._is_notified = self._is_killed = self._has_run = False
        self._kills_keepers = False
        self._agent: int | None = None
        self._signals: list[int] = []

    def close(self) -> None:
        self._wakeup.close()
        self._room.cleanup()

    def serve(self) -> None:
        """Serve the node until the agent and all keepers have exited."""
        for number in _HEARD:
            # A handler and not SIG_IGN, which child processes would inherit.
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
        signal.set_wakeup_fd(self._wakeup.fd, warn_on_full_buffer=False)
        adopt_orphans()  # keepers are reparented to the runner when the agent exits
        self._send(messages.RunnerStarted(self._rank))
        sweep(self._folder, self._attempt)
        self._start()
        poll = select.poll()
        for fd in (0, self._wakeup.fd):
            poll.register(fd, select.POLLIN)
        while not self._has_ended():
            for fd, _ in poll.poll(_LOOK_S * 1000):
                if fd == 0 and not self._handle_requests():
                    poll.unregister(0)
            self._wakeup.clear()
            self._poll()
        self._send(messages.NodeEnded(self._rank, self._outcome()))
        self._let_keepers_finish()

    # -- the agent ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._plan.write(self._node.plan)
        self._agent = os.posix_spawn(
            sys.executable,
            command("holdfast.jobs.slurm", "agent", str(self._node.path)),
            dict(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, self._plan.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsigmask=[],
            setsigdef=list(_HEARD),
        )

    def _has_ended(self) -> bool:
        """Return True once the agent has exited. Reaps adopted children."""
        while self._agent is not None:
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if ended == 0:
                return False
            if ended == self._agent:
                self._agent = None
        return True

    def _outcome(self) -> Outcome:
        phase = Phase.RUN if self._node.running.exists() else Phase.SETUP
        outcome = read_outcome(self._node.ended) or Outcome(phase)
        if self._is_killed and not outcome.is_success:
            return Outcome(outcome.phase, outcome.code, outcome.killed_by, is_stopped=True)
        return outcome

    def _poll(self) -> None:
        while self._signals:
            self._on_notice(self._signals.pop(0))
        if not self._has_run and self._node.running.exists():
            self._has_run = True
            self._send(messages.NodeRunning(self._rank))
        if self._is_killed and (left := self._left()):
            processes.kill(left)

    # -- notices and orders ----------------------------------------------------------------------------------

    def _on_notice(self, number: int) -> None:
        lead_s = self._facts.terms.grace_s if number == signal.SIGUSR1 else KILL_WAIT_S
        source = f"Slurm ({signal.Signals(number).name})"
        self._notify(messages.NotifyProcesses(source, time.time() + lead_s))
        self._send(messages.NodeNoticed(self._rank, source, lead_s))

    def _handle_requests(self) -> bool:
        """Handle the controller's requests. Return False if the controller is gone."""
        data = os.read(0, 1 << 16)
        for message in self._inbox.feed(data):
            if isinstance(message, messages.NotifyProcesses):
                self._send(messages.NoticeSent(self._rank, self._notify(message)))
            elif isinstance(message, messages.KillProcesses):
                self._is_killed = True
                self._kills_keepers = message.with_keepers
        return bool(data)

    def _notify(self, message: messages.NotifyProcesses) -> int:
        """Send the node's processes the notice, once, as many programs abort on a second SIGTERM."""
        listening = processes.topmost_handlers(self._agent) if self._agent is not None else []
        if self._is_notified:
            return len(listening)
        self._is_notified = True
        word = Notice(message.source, deadline_unix_s=message.deadline_unix_s)
        with contextlib.suppress(OSError):
            write_notice(self._node.notice, word)
        return sum(processes.send(one, signal.SIGTERM) for one in listening)

    def _left(self) -> list[processes.Process]:
        """Return the node's processes except the agent, and without keepers unless these are killed too."""
        found = processes.descendants(os.getpid(), processes.snapshot())
        return [
            one
            for one in found
            if one.pid != self._agent and (self._kills_keepers or not one.exits_by_itself)
        ]

    def _let_keepers_finish(self) -> None:
        """Wait for keepers, which may hold the last save: Slurm kills them when the runner exits."""
        keepers = [
            one for one in processes.descendants(os.getpid(), processes.snapshot()) if one.exits_by_itself
        ]
        if not self._kills_keepers:
            processes.wait_exited(keepers, self._facts.terms.grace_s)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # srun is gone, so Slurm ends the runner
            os.write(1, write(message))


def _plan(
    facts: SubmittedJob,
    folder: JobFolder,
    attempt: int,
    rank: int,
    addresses: list[str],
    num_gpus: int,
    bell: str,
) -> NodeSpec:
    notice = folder.attempt(attempt) / str(rank) / "notice"
    node = Node(
        task_id=facts.task_id,
        job=facts.number,
        name=facts.name,
        attempt=attempt,
        rank=rank,
        addresses=tuple(addresses),
        num_gpus=num_gpus,
        user=facts.user,
        notice=str(notice),
        progress=str(folder.progress),
        grace_s=facts.terms.grace_s,
        cloud="slurm",
    )
    # A keeper that waits for the next attempt would wait in vain: Slurm kills it with this one.
    base = {"HOLDFAST_KEEP_IN_MEMORY": "0", **os.environ}
    # `setup` is per machine, and another attempt may use others.
    machine = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    set_up = folder.workdir(rank).parent / f"set-up.{machine}"
    where = f" on node {rank} ({machine})" if facts.num_nodes > 1 else f" on {machine}"
    variables = node_variables(facts.task_environment, folder, rank)
    begins = f"attempt {attempt} of job {facts.number} starts{where}"
    return NodeSpec(
        headline=f"holdfast: {time.strftime('%F %T')} {begins}",
        setup=str(folder.script("setup", rank)) if facts.has_setup and not set_up.exists() else None,
        run=str(folder.script("run", rank)),
        set_up=str(set_up),
        workdir=str(folder.workdir(rank)),
        log=str(folder.log(rank)),
        bell=bell,
        notice=str(notice),
        environment=run_environment(node, base, variables),
        setup_environment=setup_environment(node, base, variables),
        grace_s=facts.terms.grace_s,
    )
