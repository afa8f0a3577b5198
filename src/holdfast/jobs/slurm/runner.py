"""Runner on each node of a Slurm job: starts the agent, and forwards signals and requests to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.jobs.environment import Node, tag
from holdfast.jobs.folder import JobFolder, NodeFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.mount_spec import read_mount_specs
from holdfast.jobs.node.mounts.scratch import ScratchOwner
from holdfast.jobs.node.preparation import make_node_spec
from holdfast.jobs.node.roles import spawn
from holdfast.jobs.node_spec import NodeSpec, machine_name, read_outcome, reserve_outcome, write_outcome
from holdfast.jobs.outcome import Outcome, Phase, unstarted
from holdfast.jobs.slurm import messages
from holdfast.jobs.slurm.job_files import JobFiles, SubmittedJob
from holdfast.jobs.slurm.messages import Inbox, Message, write
from holdfast.system.environment import read_integer
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.linux.processes import adopt_orphans, die_with_parent
from holdfast.system.linux.wakeup_pipe import WakeupPipe
from holdfast.watch.preemption.notice import Notice, write_notice

if TYPE_CHECKING:
    from holdfast.jobs.slurm.attempt_container import AttemptContainer
    from holdfast.jobs.slurm.node_mounts import NodeMounts

_LOOK_S = 1.0
_REMOVAL_S = 20.0
"""Time limit for removing the container. What is left is removed by the next attempt on this machine."""
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def run_node(folder: JobFolder, attempt: int, addresses: list[str], kill_wait_s: float) -> None:
    """Run this node's part of an attempt. Called by srun, once per node.

    Args:
        kill_wait_s: see `commands.kill_wait_s`.

    Blocks: as long as the node's commands run and keepers finish staged saves.
    """
    runner = _Runner(folder, attempt, addresses, kill_wait_s)
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
    def __init__(self, folder: JobFolder, attempt: int, addresses: list[str], kill_wait_s: float) -> None:
        self._folder, self._attempt = folder, attempt
        self._kill_wait_s = kill_wait_s
        self._facts = JobFiles(folder).read_job()
        self._rank = read_integer("SLURM_NODEID", 0)
        self._num_gpus = read_integer("SLURM_GPUS_ON_NODE", self._facts.num_gpus)
        self._node = NodeFolder(folder.attempt(attempt) / str(self._rank))
        # Not in the job's folder, whose file system may not support pipes.
        self._room = temporary_folder("node")
        self._wakeup_fifo = self._room.__enter__() / "wakeup"
        self._wakeup = WakeupPipe(self._wakeup_fifo)
        self._plan = _plan(
            self._facts, folder, attempt, self._rank, addresses, self._num_gpus, self._wakeup_fifo
        )
        self._mounts = self._find_mounts()
        self._container = self._find_container()
        self._has_scratch = self._has_sent_leftovers = False
        self._terms: messages.EndUploads | None = None  # for the uploads, from the controller
        self._inbox = Inbox()
        self._is_notified = self._is_killed = self._has_run = False
        self._kills_keepers = False
        self._agent: int | None = None
        self._signals: list[int] = []

    def close(self) -> None:
        self._wakeup.close()
        self._room.__exit__(None, None, None)

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
        self._poller = select.poll()
        for fd in (0, self._wakeup.fd):
            self._poller.register(fd, select.POLLIN)
        if read_outcome(self._node.ended) is not None:
            self._reopen_mounts()  # an earlier runner of the attempt was killed during its uploads
        elif why := self._open_mounts() or self._open_container():
            self._refuse(why)
        else:
            self._start()
        while not self._has_ended():
            self._turn()
        self._send(messages.NodeEnded(self._rank, self._outcome()))
        self._let_keepers_finish()
        if self._container is not None:
            self._container.release()
        if self._has_scratch:
            self._end_mounts()
        if self._container is not None:
            self._await_removal(self._container)

    def _turn(self) -> None:
        """Wait for an event, and handle what has happened."""
        for fd, _ in self._poller.poll(_LOOK_S * 1000):
            if fd == 0 and not self._handle_requests():
                self._poller.unregister(0)
                self._terms = self._terms or messages.EndUploads(time.time() + self._grace_s, removes=False)
        self._wakeup.clear()
        self._poll()

    # -- mounts ----------------------------------------------------------------------------------------------

    def _find_mounts(self) -> NodeMounts | None:
        """Return the mounts on the node's disk. None: the job does not have any."""
        if not read_mount_specs(self._folder):
            return None
        # Here, because it takes as long to import as all else, and most jobs do not need it.
        from holdfast.jobs.slurm.node_mounts import NodeMounts

        return NodeMounts(
            self._folder,
            ScratchOwner(self._facts.task_id, str(self._folder.path), machine_name()),
            self._attempt,
            self._rank,
            log=self._folder.log(self._rank),
            environment={**os.environ, **self._facts.task_environment},
        )

    def _open_mounts(self) -> str:
        """Open the mounts of a new attempt. Return why that is not possible, or an empty string."""
        if self._mounts is None:
            return ""
        try:
            self._mounts.open(self._wakeup_fifo, num_nodes=self._facts.num_nodes)
        except (HoldfastError, OSError) as error:
            return str(error)
        self._use_scratch(self._mounts.scratch)
        return ""

    def _reopen_mounts(self) -> None:
        if self._mounts is not None and self._mounts.reopen(self._wakeup_fifo):
            self._use_scratch(self._mounts.scratch)

    def _use_scratch(self, scratch: JobFolder) -> None:
        self._has_scratch = True
        self._plan = dataclasses.replace(self._plan, scratch=str(scratch.path))
        self._send(messages.ScratchOpened(self._rank, machine_name(), str(scratch.path)))

    def _refuse(self, why: str) -> None:
        """End the node without starting its commands."""
        with Path(self._plan.log).open("a") as log:
            log.write(f"{self._plan.headline}\nholdfast: the job cannot start: {why}\n")
        self._node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reserve_outcome(self._node.ended)
        write_outcome(self._node.ended, unstarted(why))

    def _end_mounts(self) -> None:
        """Unmount, and upload until everything is in the buckets, or the time is over."""
        assert self._mounts is not None
        shown = ""
        while not self._mounts.are_over(self._upload_until_unix_s(), self._has_keepers):
            if (missing := self._mounts.missing()) and missing != shown:
                shown = missing
                self._send(messages.NodeUploading(self._rank, missing))
            self._turn()
            processes.reap()
        while self._terms is None:  # all nodes end their commands before one gives its machine back
            self._turn()
        unsent = self._mounts.end()
        write_document(self._node.unsent, unsent)  # a controller that takes over reads it
        if self._terms.removes:
            self._mounts.remove()
        self._send(messages.UploadsEnded(self._rank, unsent.summary, unsent.is_settled))

    def _upload_until_unix_s(self) -> float | None:
        if self._kills_keepers:
            return 0.0
        return None if self._terms is None else self._terms.until_unix_s

    # -- container -------------------------------------------------------------------------------------------

    def _find_container(self) -> AttemptContainer | None:
        """Return the container of the node, or None for a job without image."""
        if not self._facts.image:
            return None
        from holdfast.jobs.slurm.attempt_container import AttemptContainer

        return AttemptContainer(self._folder, self._facts, self._attempt, self._rank, machine_name())

    def _open_container(self) -> str:
        """Specify the container. Return why that is not possible, or an empty string."""
        if self._container is None:
            return ""
        scratch = self._mounts.scratch if self._mounts is not None else None
        try:
            self._container.open(has_gpus=self._num_gpus > 0, scratch=scratch)
        except (HoldfastError, OSError) as error:
            return str(error)
        return ""

    def _await_removal(self, container: AttemptContainer) -> None:
        """Wait until the container is removed: Slurm kills its warden when the runner exits."""
        give_up_s = time.monotonic() + _REMOVAL_S
        while not container.is_gone and time.monotonic() < give_up_s:
            self._turn()
            processes.reap()

    # -- the agent ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._plan.write(self._node.plan)
        self._agent = spawn(("holdfast.jobs.slurm", "agent", str(self._node.path)), Path(self._plan.log))

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
        if self._has_scratch and not self._has_sent_leftovers:
            self._poll_leftovers()
        if self._is_killed and (left := self._left()):
            processes.kill(left)

    def _poll_leftovers(self) -> None:
        assert self._mounts is not None
        if self._mounts.are_leftovers_sent:
            self._has_sent_leftovers = True
            self._send(messages.LeftoversSent(self._rank))

    # -- notices and orders ----------------------------------------------------------------------------------

    def _on_notice(self, number: int) -> None:
        lead_s = self._facts.terms.grace_s if number == signal.SIGUSR1 else self._kill_wait_s
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
                if self._mounts is not None and self._has_scratch:
                    self._mounts.stop()
                if self._container is not None:
                    self._container.stop()
            elif isinstance(message, messages.OpenMounts) and self._mounts is not None and self._has_scratch:
                self._mounts.allow()
            elif isinstance(message, messages.EndUploads):
                self._terms = message
        return bool(data)

    def _notify(self, message: messages.NotifyProcesses) -> int:
        """Send the node's processes the notice, once, as many programs abort on a second SIGTERM."""
        listening = processes.topmost_handlers(self._agent) if self._agent is not None else []
        if self._is_notified:
            return len(listening)
        self._is_notified = True
        notice = Notice(message.source, deadline_unix_s=message.deadline_unix_s)
        with contextlib.suppress(OSError):
            write_notice(self._node.notice, notice)
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
        give_up_s = time.monotonic() + self._grace_s
        while self._has_keepers() and not self._kills_keepers and time.monotonic() < give_up_s:
            self._turn()
            processes.reap()

    def _has_keepers(self) -> bool:
        found = processes.descendants(os.getpid(), processes.snapshot())
        if self._has_scratch:  # uploaders have a deadline of their own
            return any(one.is_keeper for one in found)
        return any(one.exits_by_itself for one in found)

    @property
    def _grace_s(self) -> float:
        return self._facts.terms.grace_s

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
    wakeup: Path,
) -> NodeSpec:
    node = Node(
        task_id=facts.task_id,
        job=facts.number,
        name=facts.name,
        attempt=attempt,
        rank=rank,
        addresses=tuple(addresses),
        num_gpus=num_gpus,
        user=facts.user,
        notice=str(folder.node(attempt, rank).notice),
        progress=str(folder.progress),
        grace_s=facts.terms.grace_s,
        cloud="slurm",
    )
    # A keeper that waits for the next attempt would wait in vain: Slurm kills it with this one.
    base = {"HOLDFAST_KEEP_IN_MEMORY": "0", **os.environ}
    # `setup` is per machine, and another attempt may use others.
    machine = machine_name()
    set_up = folder.workdir(rank).parent / f"set-up.{machine}"
    where = f" on node {rank} ({machine})" if facts.num_nodes > 1 else f" on {machine}"
    if facts.image:
        from holdfast.jobs.slurm.attempt_container import step_variables

        base = step_variables(base)
        set_up = folder.attempt(attempt) / str(rank) / "set-up"  # a new container has nothing installed
    return make_node_spec(
        folder,
        node,
        base,
        facts.task_environment,
        begins=f"attempt {attempt} of job {facts.number} starts{where}",
        wakeup=wakeup,
        set_up=set_up if facts.has_setup else None,
        has_venv=not facts.image,
        machine=machine,
    )
