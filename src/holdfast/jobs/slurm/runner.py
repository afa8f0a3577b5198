"""Runner of a Slurm job on each node: runs its commands, and follows signals and the controller's orders."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.errors import HoldfastError, Unsupported
from holdfast.jobs.environment import container_base
from holdfast.jobs.folder import NodeFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.agent import Agent
from holdfast.jobs.node.containers.container import (
    Container,
    ContainerOwner,
    ContainerRuntime,
    find_runtime,
    make_image_spec,
)
from holdfast.jobs.node.mounts.mount_records import read_mount_specs
from holdfast.jobs.node.preparation import make_node_spec
from holdfast.jobs.node.roles import STOPPED
from holdfast.jobs.node_spec import Environment, NodeSpec, machine_name, read_environment, read_outcome
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.slurm.job_files import (
    Inbox,
    JobFiles,
    NodeReport,
    NodeUploads,
    Orders,
    UploadTerms,
    as_line,
)
from holdfast.system.environment import read_integer
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.linux.processes import adopt_orphans
from holdfast.system.linux.wakeup_pipe import WakeupPipe
from holdfast.watch.preemption.sources import Notice, write_notice

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


def run_node(folder: JobFiles, attempt: int, addresses: list[str], kill_wait_s: float) -> None:
    """Run this node's part of an attempt. Called by srun, once per node."""
    # Not in the job's folder, whose file system may not support pipes.
    with temporary_folder("node") as room, closing(WakeupPipe(room / "wakeup")) as wakeup:
        _Runner(folder, attempt, addresses, kill_wait_s, wakeup, room / "wakeup").serve()


class _Runner:
    def __init__(
        self,
        folder: JobFiles,
        attempt: int,
        addresses: list[str],
        kill_wait_s: float,
        wakeup: WakeupPipe,
        fifo: Path,
    ) -> None:
        self._folder, self._attempt, self._kill_wait_s = folder, attempt, kill_wait_s
        self._wakeup, self._wakeup_fifo = wakeup, fifo
        self._job = folder.read_job()
        self._variables = read_environment(folder).task
        self._rank = read_integer("SLURM_NODEID", 0)
        self._num_gpus = read_integer("SLURM_GPUS_ON_NODE", self._job.spec.num_gpus)
        self._node = NodeFolder(folder.attempt(attempt) / str(self._rank))
        self._plan = self._make_plan(addresses)
        self._mounts: NodeMounts | None = None  # once they are open
        container = Container(folder, self._node.container, Path(self._plan.log))
        self._container = container if self._job.spec.image else None
        self._report = NodeReport(self._rank)
        self._orders = Orders()
        self._inbox = Inbox(Orders)
        self._fds = [0, wakeup.fd]  # orders, and wakeups
        self._signals: list[int] = []
        self._is_notified = False

    def serve(self) -> None:
        """Serve the node until its commands and all keepers have exited, and all is uploaded."""
        for number in _HEARD:
            # A handler and not SIG_IGN, which child processes would inherit.
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
        signal.set_wakeup_fd(self._wakeup.fd, warn_on_full_buffer=False)
        adopt_orphans()  # the job's processes that outlive their parents
        self._send()
        processes.end_other_attempts(self._job.task_id, self._attempt)
        outcome = read_outcome(self._node.ended)
        if outcome is None:
            outcome = self._run()
        else:
            self._open_mounts(is_new=False)  # an earlier runner was killed during the uploads
        if self._orders.kills and not outcome.is_success:
            outcome = Outcome(outcome.phase, outcome.code, outcome.killed_by, is_stopped=True)
        self._tell(outcome=outcome, is_running=self._node.running.exists())  # perhaps between two looks
        # Keepers may hold the last save, and Slurm kills them when the runner exits.
        self._turn_until(
            lambda: self._orders.kills_keepers or not self._has_keepers(), self._job.policy.grace_s
        )
        container = self._container
        if container is not None and container.files.image.exists():
            container.release()
        if self._mounts is not None:
            self._end_mounts(self._mounts)
        if container is not None:  # Slurm kills its warden when the runner exits
            removed = container.files.removed
            self._turn_until(lambda: removed.exists() or not container.is_alive, _REMOVAL_S)

    def _run(self) -> Outcome:
        """Run the commands of the node."""
        why_not = self._open_mounts(is_new=True) or self._open_container()
        self._node.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            agent = Agent(
                self._node, self._plan, on_look=self._look, fds=lambda: self._fds, mounts=self._mounts
            )
            return agent.run(why_not)
        except Exception:  # noqa: BLE001 - the node is lost, and its files are uploaded all the same
            with contextlib.suppress(OSError), Path(self._plan.log).open("a") as log:
                traceback.print_exc(file=log)
            processes.kill(processes.rest(with_keepers=self._orders.kills_keepers))
            return Outcome(Phase.RUN if self._node.running.exists() else Phase.SETUP)

    def _turn_until(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Serve the node until a condition is true, or the time is over."""
        give_up_s = time.monotonic() + limit_s
        while not is_over() and time.monotonic() < give_up_s:
            self._turn()

    def _turn(self) -> None:
        """Wait for an event, and handle what has happened."""
        select.select(self._fds, [], [], _LOOK_S)
        self._look()
        processes.reap()

    def _look(self) -> None:
        """Handle what has happened: signals, orders, and what to report."""
        self._wakeup.clear()
        if 0 in self._fds and select.select([0], [], [], 0)[0]:
            self._receive()
        while self._signals:
            number = self._signals.pop(0)
            lead_s = self._job.policy.grace_s if number == signal.SIGUSR1 else self._kill_wait_s
            source = f"Slurm ({signal.Signals(number).name})"
            self._notify(source)
            self._tell(notice=source, notice_lead_s=lead_s)
        self._tell(
            is_running=self._report.is_running or self._node.running.exists(),
            are_leftovers_sent=self._mounts is not None and self._mounts.are_leftovers_sent,
        )
        if self._orders.kills:
            processes.kill(processes.rest(with_keepers=self._orders.kills_keepers))

    def _make_plan(self, addresses: list[str]) -> NodeSpec:
        """Return the specification of the node's work."""
        spec, folder, machine = self._job.spec, self._folder, machine_name()
        # A keeper that waits for the next attempt would wait in vain: Slurm kills it with this one.
        base = {"HOLDFAST_KEEP_IN_MEMORY": "0", **os.environ}
        # `setup` is per machine, and another attempt may use others.
        set_up = folder.workdir(self._rank).parent / f"set-up.{machine}"
        if spec.image:
            base = step_variables(base)
            set_up = self._node.path / "set-up"  # a new container has nothing installed
        return make_node_spec(
            folder,
            self._job,
            self._attempt,
            self._rank,
            addresses,
            Environment(base, self._variables),
            wakeup=self._wakeup_fifo,
            set_up=set_up,
            num_gpus=self._num_gpus,
            where=f" on node {self._rank} ({machine})" if spec.num_nodes > 1 else f" on {machine}",
            machine=machine,
            cloud="slurm",
        )

    # -- mounts ----------------------------------------------------------------------------------------------
    def _open_mounts(self, *, is_new: bool) -> str:
        """Open the mounts on the node's disk, if the job has some. Return why that is not possible, or ""."""
        if not read_mount_specs(self._folder):
            return ""
        # Here, because it takes as long to import as all else, and most jobs do not need it.
        from holdfast.jobs.slurm.mounts import open_mounts

        try:
            self._mounts = open_mounts(
                self._folder,
                self._job,
                self._attempt,
                self._rank,
                environment={**os.environ, **self._variables},
                wakeup=self._wakeup_fifo,
                is_new=is_new,
            )
        except (HoldfastError, OSError) as error:
            if not is_new:
                raise
            return str(error)
        if self._mounts is not None:
            self._tell(uploads=NodeUploads(machine_name(), str(self._mounts.job.path)))
        return ""

    def _end_mounts(self, mounts: NodeMounts) -> None:
        """Unmount, and upload until everything is in the buckets, or the time is over."""
        while not mounts.is_over(self._until_unix_s(), self._has_keepers):
            self._tell(uploading=mounts.missing())
            self._turn()
        while self._orders.uploads is None:  # all nodes end their commands before one gives its machine back
            self._turn()
        unsent = mounts.end()
        write_document(self._node.unsent, unsent)  # a controller that takes over reads it
        if self._orders.uploads.removes:
            mounts.remove()
        uploads = NodeUploads(machine_name(), str(mounts.job.path), unsent.summary, unsent.is_settled)
        self._tell(uploads=uploads, uploading="")

    def _until_unix_s(self) -> float | None:
        """Return the deadline of the uploads. None: as long as it takes."""
        if self._orders.kills_keepers:
            return 0.0
        return None if self._orders.uploads is None else self._orders.uploads.until_unix_s

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
                scratch=self._mounts.job if self._mounts is not None else None,
                owner=ContainerOwner(machine_name(), self._attempt, own.pid, own.start),
            )
            self._container.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_document(self._container.files.image, spec)
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

    # -- notices and orders ----------------------------------------------------------------------------------
    def _receive(self) -> None:
        """Receive and follow the controller's orders."""
        data = os.read(0, 1 << 16)
        for orders in self._inbox.feed(data):
            self._orders = orders
            if orders.notice and orders.notice_unix_s != self._report.notified_unix_s:
                num_listening = self._notify(orders.notice)
                self._tell(notified_unix_s=orders.notice_unix_s, num_listening=num_listening)
        orders = self._orders
        if not data:  # the controller is gone
            self._fds.remove(0)
            if orders.uploads is None:
                terms = UploadTerms(time.time() + self._job.policy.grace_s, removes=False)
                self._orders = replace(orders, uploads=terms)
        if self._mounts is not None and orders.opens_mounts:
            self._mounts.allow()
        if orders.kills and (self._mounts is not None or self._container is not None):
            with contextlib.suppress(OSError):  # what waits for mounts or the container ends
                (self._folder.attempt(self._attempt) / STOPPED).touch()

    def _notify(self, source: str) -> int:
        """Send the node's processes the notice, once, as many programs abort on a second SIGTERM."""
        listening = processes.topmost_handlers(os.getpid()) if self._report.outcome is None else []
        if self._is_notified:
            return len(listening)
        self._is_notified = True
        with contextlib.suppress(OSError):
            write_notice(self._node.notice, Notice(source))
        return sum(processes.send(one, signal.SIGTERM) for one in listening)

    def _has_keepers(self) -> bool:
        found = processes.rest(with_keepers=True)
        if self._mounts is not None:  # uploaders have a deadline of their own
            return any(one.is_keeper for one in found)
        return any(one.exits_by_itself for one in found)

    def _tell(self, **changes: Any) -> None:
        """Change the report of the node, and send it if it has changed."""
        report = replace(self._report, **changes)
        if report != self._report:
            self._report = report
            self._send()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # srun is gone, so Slurm ends the runner
            os.write(1, as_line(self._report))


def step_variables(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a step of Slurm that its containers have too; see `container_base`."""
    own = {name: value for name, value in base.items() if name.startswith(_OF_STEP) or name in _OF_DEVICES}
    return {**container_base(base), **own}
