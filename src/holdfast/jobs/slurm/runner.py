"""Runner on each node of a Slurm job: starts the agent, and forwards signals and requests to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, Unsupported
from holdfast.jobs.environment import Node, container_base, tag
from holdfast.jobs.folder import JobFolder, NodeFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.lease import (
    ContainerOwner,
    ContainerRuntime,
    find_runtime,
    make_image_spec,
    start_warden,
    warden_of,
)
from holdfast.jobs.node.mounts.mount_records import read_mount_specs
from holdfast.jobs.node.mounts.scratch import ScratchOwner
from holdfast.jobs.node.preparation import make_node_spec
from holdfast.jobs.node.roles import STOPPED, spawn
from holdfast.jobs.node_spec import (
    NodeSpec,
    machine_name,
    read_environment,
    read_outcome,
    reserve_outcome,
    write_outcome,
)
from holdfast.jobs.outcome import Outcome, Phase, unstarted
from holdfast.jobs.slurm import messages
from holdfast.jobs.slurm.job_files import JobFiles
from holdfast.jobs.slurm.messages import Inbox, Message, write
from holdfast.system.environment import read_integer
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.linux.processes import adopt_orphans, die_with_parent
from holdfast.system.linux.wakeup_pipe import WakeupPipe
from holdfast.watch.preemption.notice import Notice, write_notice

if TYPE_CHECKING:
    from holdfast.jobs.slurm.mounts import NodeMounts

_LOOK_S = 1.0
_REMOVAL_S = 20.0
"""Time limit for removing the container. What is left is removed by the next attempt on this machine."""
_OF_STEP = ("SLURM", "PMI")
"""Beginnings of the names of Slurm's variables, which describe the allocation and the step."""
_OF_DEVICES = frozenset(
    {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
)
"""Variables with the devices that Slurm has given to the step."""
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def run_node(folder: JobFolder, attempt: int, addresses: list[str], kill_wait_s: float) -> None:
    """Run this node's part of an attempt. Called by srun, once per node.

    Blocks: as long as the node's commands run and keepers finish staged saves.
    """
    # Not in the job's folder, whose file system may not support pipes.
    with temporary_folder("node") as room, closing(WakeupPipe(room / "wakeup")) as wakeup:
        _Runner(folder, attempt, addresses, kill_wait_s, wakeup, room / "wakeup").serve()


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
    processes.kill(left)


def die_with_runner() -> None:
    """Make the kernel kill this agent, and so its shell, when the runner dies."""
    die_with_parent()
    if os.getppid() == 1:  # the runner died before the call
        os.kill(os.getpid(), signal.SIGKILL)


class _Runner:
    def __init__(
        self,
        folder: JobFolder,
        attempt: int,
        addresses: list[str],
        kill_wait_s: float,
        wakeup: WakeupPipe,
        fifo: Path,
    ) -> None:
        self._folder, self._attempt, self._kill_wait_s = folder, attempt, kill_wait_s
        self._wakeup, self._wakeup_fifo = wakeup, fifo
        self._job = JobFiles(folder).read_job()
        self._variables = read_environment(folder).task
        self._rank = read_integer("SLURM_NODEID", 0)
        self._num_gpus = read_integer("SLURM_GPUS_ON_NODE", self._job.spec.num_gpus)
        self._node = NodeFolder(folder.attempt(attempt) / str(self._rank))
        self._plan = self._make_plan(addresses)
        self._mounts: NodeMounts | None = None  # once they are open
        self._container = self._node.container if self._job.spec.image else None
        self._has_sent_leftovers = False
        self._terms: messages.EndUploads | None = None  # for the uploads, from the controller
        self._inbox = Inbox()
        self._is_notified = self._is_killed = self._has_run = False
        self._kills_keepers = False
        self._agent: int | None = None
        self._signals: list[int] = []

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
            self._open_mounts(is_new=False)  # an earlier runner was killed during the uploads
        elif why := self._open_mounts(is_new=True) or self._open_container():
            self._refuse(why)
        else:
            self._node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_document(self._node.plan, self._plan)
            words = ("holdfast.jobs.slurm", "agent", str(self._node.path))
            self._agent = spawn(words, Path(self._plan.log))
        while not self._has_ended():
            self._turn()
        self._send(messages.NodeEnded(self._rank, self._outcome()))
        # Keepers may hold the last save, and Slurm kills them when the runner exits.
        self._turn_until(lambda: self._kills_keepers or not self._has_keepers(), self._job.policy.grace_s)
        if self._container is not None and self._container.image.exists():
            self._container.unneeded.touch()
            start_warden(self._folder, self._container, Path(self._plan.log))
        if self._mounts is not None:
            self._end_mounts(self._mounts)
        if (container := self._container) is not None:  # Slurm kills its warden when the runner exits
            role = warden_of(container)
            self._turn_until(lambda: container.removed.exists() or not role.is_alive, _REMOVAL_S)

    def _turn_until(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Serve the node until a condition is true, or the time is over."""
        give_up_s = time.monotonic() + limit_s
        while not is_over() and time.monotonic() < give_up_s:
            self._turn()
            processes.reap()

    def _turn(self) -> None:
        """Wait for an event, and handle what has happened."""
        for fd, _ in self._poller.poll(_LOOK_S * 1000):
            if fd == 0 and not self._handle_requests():
                self._poller.unregister(0)
                self._terms = self._terms or messages.EndUploads(
                    time.time() + self._job.policy.grace_s, removes=False
                )
        self._wakeup.clear()
        self._poll()

    def _make_plan(self, addresses: list[str]) -> NodeSpec:
        """Return the specification of the node's work."""
        job, spec, folder, machine = self._job, self._job.spec, self._folder, machine_name()
        node = Node(
            task_id=job.task_id,
            job=job.number,
            name=job.name,
            attempt=self._attempt,
            rank=self._rank,
            addresses=tuple(addresses),
            num_gpus=self._num_gpus,
            user=spec.user,
            notice=str(self._node.notice),
            progress=str(folder.progress),
            grace_s=job.policy.grace_s,
            cloud="slurm",
        )
        # A keeper that waits for the next attempt would wait in vain: Slurm kills it with this one.
        base = {"HOLDFAST_KEEP_IN_MEMORY": "0", **os.environ}
        # `setup` is per machine, and another attempt may use others.
        set_up = folder.workdir(self._rank).parent / f"set-up.{machine}"
        if spec.image:
            base = step_variables(base)
            set_up = self._node.path / "set-up"  # a new container has nothing installed
        where = f" on node {self._rank} ({machine})" if spec.num_nodes > 1 else f" on {machine}"
        return make_node_spec(
            folder,
            node,
            base,
            self._variables,
            begins=f"attempt {self._attempt} of job {job.number} starts{where}",
            wakeup=self._wakeup_fifo,
            set_up=set_up if spec.has_setup else None,
            has_venv=not spec.image,
            machine=machine,
        )

    # -- mounts ----------------------------------------------------------------------------------------------

    def _open_mounts(self, *, is_new: bool) -> str:
        """Open the mounts on the node's disk, if the job has some. Return why that is not possible, or ""."""
        if not read_mount_specs(self._folder):
            return ""
        # Here, because it takes as long to import as all else, and most jobs do not need it.
        from holdfast.jobs.slurm.mounts import NodeMounts

        try:
            mounts = NodeMounts(
                self._folder,
                ScratchOwner(self._job.task_id, str(self._folder.path), machine_name()),
                self._attempt,
                self._rank,
                log=self._folder.log(self._rank),
                environment={**os.environ, **self._variables},
                wakeup=self._wakeup_fifo,
            )
            is_open = mounts.open(num_nodes=self._job.spec.num_nodes) if is_new else mounts.reopen()
        except (HoldfastError, OSError) as error:
            if not is_new:
                raise
            return str(error)
        if is_open:
            scratch = str(mounts.scratch.path)
            self._mounts, self._plan = mounts, dataclasses.replace(self._plan, scratch=scratch)
            self._send(messages.ScratchOpened(self._rank, machine_name(), scratch))
        return ""

    def _refuse(self, why: str) -> None:
        """End the node without starting its commands."""
        with Path(self._plan.log).open("a") as log:
            log.write(f"{self._plan.headline}\nholdfast: the job cannot start: {why}\n")
        self._node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reserve_outcome(self._node.ended)
        write_outcome(self._node.ended, unstarted(why))

    def _end_mounts(self, mounts: NodeMounts) -> None:
        """Unmount, and upload until everything is in the buckets, or the time is over."""
        shown = ""
        while True:
            until_unix_s = None if self._terms is None else self._terms.until_unix_s
            if mounts.are_over(0.0 if self._kills_keepers else until_unix_s, self._has_keepers):
                break
            if (missing := mounts.missing()) and missing != shown:
                shown = missing
                self._send(messages.NodeUploading(self._rank, missing))
            self._turn()
            processes.reap()
        while self._terms is None:  # all nodes end their commands before one gives its machine back
            self._turn()
        unsent = mounts.end()
        write_document(self._node.unsent, unsent)  # a controller that takes over reads it
        if self._terms.removes:
            mounts.remove()
        self._send(messages.UploadsEnded(self._rank, unsent.summary, unsent.is_settled))

    # -- container -------------------------------------------------------------------------------------------

    def _open_container(self) -> str:
        """Specify the container, which the agent has made. Return why that is not possible, or ""."""
        if self._container is None:
            return ""
        own = processes.find(os.getpid())
        assert own is not None
        try:
            spec = make_image_spec(
                self._folder,
                self._runtime(),
                self._job.spec.image,
                self._job.task_id,
                has_gpus=self._num_gpus > 0,
                scratch=self._mounts.scratch if self._mounts is not None else None,
                owner=ContainerOwner(machine_name(), self._attempt, own.pid, own.start),
            )
            self._container.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_document(self._container.image, spec)
        except (HoldfastError, OSError) as error:
            return str(error)
        return ""

    def _runtime(self) -> ContainerRuntime:
        runtime = find_runtime()
        if runtime is None:
            raise Unsupported(
                f"the commands run in the image {self._job.spec.image}, and neither podman nor docker "
                f"answers on {machine_name()} (`podman info`, `docker info`). Install podman on the nodes "
                "(`apt-get install podman uidmap`), or choose nodes that have it, with a partition in "
                "`infra` or sbatch's `constraint`. Without image_id, the commands run on the nodes as "
                "they are."
            )
        return runtime

    # -- the agent ------------------------------------------------------------------------------------------

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
        if self._mounts is not None and not self._has_sent_leftovers:
            self._has_sent_leftovers = self._mounts.are_leftovers_sent
            if self._has_sent_leftovers:
                self._send(messages.LeftoversSent(self._rank))
        if self._is_killed and (left := self._left()):
            processes.kill(left)

    # -- notices and orders ----------------------------------------------------------------------------------

    def _on_notice(self, number: int) -> None:
        lead_s = self._job.policy.grace_s if number == signal.SIGUSR1 else self._kill_wait_s
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
                if self._mounts is not None:
                    self._mounts.stop()
                if self._container is not None:  # an agent that waits for it ends
                    (self._folder.attempt(self._attempt) / STOPPED).touch()
            elif isinstance(message, messages.OpenMounts) and self._mounts is not None:
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

    def _has_keepers(self) -> bool:
        found = processes.descendants(os.getpid(), processes.snapshot())
        if self._mounts is not None:  # uploaders have a deadline of their own
            return any(one.is_keeper for one in found)
        return any(one.exits_by_itself for one in found)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # srun is gone, so Slurm ends the runner
            os.write(1, write(message))


def step_variables(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a step of Slurm that its containers have too; see `container_base`."""
    own = {name: value for name, value in base.items() if name.startswith(_OF_STEP) or name in _OF_DEVICES}
    return {**container_base(base), **own}
