"""The controller of a Slurm job, on the job's first node. One srun runs the nodes of an attempt."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace
from typing_extensions import override

from holdfast.errors import HoldfastError, RetryLater, Unsupported
from holdfast.jobs.controller import Controller
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.job_secrets import check_has_secrets, remove_secrets
from holdfast.jobs.node.mounts.mount_records import create_links
from holdfast.jobs.node.mounts.scratch import moved_links, remove_shared_links, shared_links
from holdfast.jobs.notifications import wait_for_notifier
from holdfast.jobs.outcome import Outcome, Phase, own_ends
from holdfast.jobs.records import JobRequest, Records
from holdfast.jobs.slurm import commands
from holdfast.jobs.slurm.commands import choose_left_out, joined
from holdfast.jobs.slurm.job_files import Inbox, JobFiles, NodeReport, Orders, UploadTerms, as_line
from holdfast.jobs.slurm.mounts import ClusterMounts
from holdfast.jobs.state_machine import (
    AttemptDue,
    AttemptExited,
    ControllerFailed,
    JobEvent,
    JobState,
    NodeExited,
    NodesRunning,
    NoticeDelivered,
    NoticeReceived,
    Uploading,
    advance,
)
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import Timers
from holdfast.system.entry import command
from holdfast.system.environment import read_integer
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_POLL_S = 1.0  # interval for checking requests: a file on a shared file system wakes no process
_STUBBORN_S = 30.0  # time limit for nodes to kill their processes, before Slurm does it
_NOTIFIER_S = 60.0  # time limit for sending the notification of the job's end while the job has its nodes
_MAX_SILENT = 3
_RETRY_S = 5.0
_MAX_RETRIES = 60
FAILED = 1
_T = TypeVar("_T")


def supervise(files: JobFiles) -> int:
    """Run the controller of a job, and return the exit status of its batch script."""
    controller = SlurmController(files)
    controller.serve_or_give_up()
    if controller.has_ended:
        remove_shared_links(files, files.read_job().task_id)  # they lead to files on the nodes
        remove_secrets(files)
        # Slurm ends the processes of the job with this script. The next command sends the rest.
        wait_for_notifier(files, limit_s=_NOTIFIER_S)
    return 0 if controller.state.status is JobStatus.SUCCEEDED else FAILED


class Step:
    """srun process that runs the nodes of one attempt."""

    def __init__(self, folder: JobFolder, attempt: int, num_nodes: int, kill_wait_s: float) -> None:
        # Created here, once: other nodes' file systems may cache for long that it does not exist.
        folder.attempt(attempt).mkdir(mode=0o700, parents=True, exist_ok=True)
        addresses = commands.addresses(os.environ["SLURM_JOB_NODELIST"])
        # srun uses the job's options, except for CPUs per task, which it needs again (since 22.05).
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        self._srun = subprocess.Popen(
            [
                "srun",
                f"--nodes={num_nodes}",
                f"--ntasks={num_nodes}",
                "--ntasks-per-node=1",
                *([f"--cpus-per-task={cpus}"] if cpus else []),
                "--kill-on-bad-exit=1",  # a runner only fails if it was killed, and its peers wait in vain
                "--wait=0",
                "--unbuffered",
                *command(
                    *("holdfast.jobs.slurm", "runner", str(folder.path), str(attempt)),
                    ",".join(addresses),
                    str(kill_wait_s),
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # srun would forward a signal, or end everything
        )
        assert self._srun.stdin is not None
        assert self._srun.stdout is not None
        self._in, self._out = self._srun.stdin, self._srun.stdout
        self._inbox = Inbox(NodeReport)
        self.reports: dict[int, NodeReport] = {}  # the newest of each node
        self.orders = Orders()  # the newest
        self.has_ended = False  # true once no runner is left

    @property
    def fd(self) -> int:
        """Descriptor that is readable when a node has sent a report."""
        return self._out.fileno()

    def receive(self) -> None:
        """Receive the nodes' reports since the last call."""
        if not select.select([self._out], [], [], 0)[0]:
            return
        data = os.read(self._out.fileno(), 1 << 16)
        if not data:
            self._srun.wait()
            self.has_ended = True
        self.reports.update((report.node, report) for report in self._inbox.feed(data))
        for line in self._inbox.others:
            sys.stderr.write(f"{line}\n")
        self._inbox.others.clear()

    def order(self, **changes: Any) -> None:
        """Change the orders of all nodes."""
        orders = replace(self.orders, **changes)
        if orders != self.orders:
            self.orders = orders
            with contextlib.suppress(OSError):
                os.write(self._in.fileno(), as_line(orders))

    def close(self) -> None:
        """Close the pipes to srun."""
        self._in.close()
        self._out.close()


class SlurmController(Controller):
    """Controller of a Slurm job, the only process that writes the job's state."""

    def __init__(self, files: JobFiles) -> None:
        self._files = files
        self._stored = stored = files.read_state()
        super().__init__(
            files, files.read_job(), stored.job_state, log=files.output, step_before=stored.step_before
        )
        self._slurm_id = os.environ.get("SLURM_JOB_ID", "")
        self.shown_machines = tuple(filter(None, [os.environ.get("SLURM_JOB_NODELIST")]))
        self._restart = read_integer("SLURM_RESTART_COUNT", 0)
        self._kill_wait_s = commands.kill_wait_s()
        self._step: Step | None = None
        self._noticed: dict[int, str] = {}  # newest notice from Slurm that was handled, by node
        self._has_reports = False  # a node has sent a report in this attempt
        self._signals: list[int] = []
        self._is_requeued = False
        self._mounts = ClusterMounts(files, self._job.spec.num_nodes, self._stored.uploads)
        self._num_resumed = 0  # steps that only continue the uploads of the attempt
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @override
    def _begin(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):  # recorded, and each wakes the loop
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        assert self._stored.restart <= self._restart, "Slurm has started the job again elsewhere"
        self._stored = replace(self._stored, restart=self._restart, slurm_id=self._slurm_id)
        self._mounts.read_ends(self._files, self.state.attempt)
        if self.state.is_active and not self._can_resume():  # the previous controller was lost with its nodes
            self._apply(
                AttemptExited(
                    self.state.attempt, self._has_advanced(), self._mounts.missing(with_settled=False)
                )
            )
        self.answer_requests()
        if not self.has_ended and self._is_on_excluded():
            self._requeue()
        elif not self.has_ended:
            self._apply(AttemptDue())

    @override
    def _is_leaving(self) -> bool:
        return self._is_requeued

    # -- stored state ----------------------------------------------------------------------------------------
    @override
    def _save(
        self, state: JobState, timers: Timers, *, now_unix_s: float, answered: JobRequest | None
    ) -> None:
        changes: dict[str, Any] = {}
        if answered is not None:
            changes["num_answered"] = self._stored.num_answered + 1
        if state != self.state:
            changes["job_state"], changes["step_before"] = state, self._step_before
            started_s = now_unix_s if state.attempt else None
            changes["started_unix_s"] = self._stored.started_unix_s or started_s
            changes["ended_unix_s"] = now_unix_s if state.status.is_final else None
        if changes:
            self._store(**changes)

    def _store(self, **changes: Any) -> None:
        """Store the state. Exit if Slurm has started the job elsewhere, where a new controller stores it."""
        if self._files.read_state().restart > self._restart:
            raise SystemExit(FAILED)
        self._stored = replace(self._stored, **changes)
        self._files.write_state(self._stored)

    @override
    def _requests(self) -> list[JobRequest]:
        return self._files.read_requests()[self._stored.num_answered :]

    # -- actions ---------------------------------------------------------------------------------------------
    @override
    def _prepare_attempt(self) -> None:
        self._noticed, self._has_reports = {}, False
        self._mounts = ClusterMounts(self._files, self._job.spec.num_nodes, {})
        self._num_resumed = 0
        if self._stored.uploads:
            self._store(uploads={})

    @override
    def _start_nodes(self) -> None:
        check_has_secrets(self._files)
        self._store(machines=_own_names())
        self._step = Step(self._files, self.state.attempt, self._job.spec.num_nodes, self._kill_wait_s)

    @override
    def _notify_nodes(self, source: str, deadline_unix_s: float) -> JobEvent | None:
        if self._step is not None:
            self._step.order(notice=source, notice_unix_s=deadline_unix_s)
        return None  # the nodes report it

    @override
    def _kill_nodes(self, since_unix_s: float, *, with_keepers: bool) -> None:
        if self._step is None:
            return
        self._step.order(kills=True, kills_keepers=with_keepers)
        grace_s = 0.0 if with_keepers else self._job.policy.grace_s  # runners wait for keepers
        is_due = self._clock.unix_s() >= since_unix_s + grace_s + _STUBBORN_S
        terms = self._step.orders.uploads
        may_upload = terms is not None and (
            terms.until_unix_s is None or time.time() < terms.until_unix_s + _STUBBORN_S
        )
        if is_due and not may_upload:
            commands.kill_steps(self._slurm_id)

    @override
    def _missing_uploads(self) -> str:
        return self._mounts.missing()

    @override
    def _node_machines(self) -> tuple[str, ...]:
        return self._stored.machines

    @override
    def _gone_machines(self, names: tuple[str, ...]) -> frozenset[str]:
        with contextlib.suppress(RetryLater, Unsupported):
            return commands.failed_nodes(names)
        return frozenset()

    @override
    def _abandon(self) -> None:
        if self._step is not None:
            with contextlib.suppress(HoldfastError):
                commands.kill_steps(self._slurm_id)
            self._step.close()

    # -- events ----------------------------------------------------------------------------------------------
    @override
    def _receive_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            lead_s = self._job.policy.grace_s if number == signal.SIGUSR1 else self._kill_wait_s
            source = f"Slurm ({signal.Signals(number).name})"
            if not self.state.is_active and not self.has_ended:
                self._requeue()  # between two attempts: nothing has to be saved
            elif not self.state.is_noticed:
                self._apply(self._notice(lead_s, source))

    def _notice(self, lead_s: float, source: str) -> JobEvent:
        """Return the event of a notice. One after the end of all commands limits their uploads."""
        if self._have_all_ended():
            self._mounts.limit_unix_s = self._mounts.limit_unix_s or time.time() + lead_s
        return NoticeReceived(lead_s, source)

    def _have_all_ended(self) -> bool:
        return len(self.state.outcomes) == self._job.spec.num_nodes

    @override
    def _node_events(self) -> Iterator[JobEvent]:
        if self._step is None:
            return
        self._step.receive()
        reports = self._step.reports
        self._has_reports = self._has_reports or bool(reports)
        if self._mounts.note(reports):
            self._store(uploads=dict(self._mounts.uploads))
        yield from self._reported_events(self._step)
        self._open_mounts(self._step)
        if self._step.has_ended:
            yield from self._end_attempt()
        elif self._mounts.has_some and self._have_all_ended():
            yield from self._upload(self._step)

    def _reported_events(self, step: Step) -> Iterator[JobEvent]:
        """Yield the events that the reports of the nodes show."""
        attempt, num_nodes = self.state.attempt, self._job.spec.num_nodes
        reports = dict(sorted(step.reports.items()))
        if len(reports) == num_nodes and all(one.is_running for one in reports.values()):
            yield NodesRunning(attempt)
        for node, report in reports.items():
            if report.notice and self._noticed.get(node) != report.notice:
                self._noticed[node] = report.notice
                if not self.state.is_noticed:
                    yield self._notice(report.notice_lead_s, report.notice)
        notified = {
            node: report.num_listening
            for node, report in reports.items()
            if report.notified_unix_s == step.orders.notice_unix_s
        }
        has_sent = self._is_notified and bool(step.orders.notice)  # the newest notice
        if has_sent and len(notified.keys() | self.state.outcomes.keys()) == num_nodes:
            yield NoticeDelivered(attempt, sum(notified.values()))
        for node, report in reports.items():
            if report.outcome is not None:
                yield NodeExited(attempt, node, report.outcome)

    def _open_mounts(self, step: Step) -> None:
        """Let the nodes mount, once leftovers of earlier attempts can no longer replace their files."""
        num_sent = sum(one.are_leftovers_sent for one in step.reports.values())
        if step.orders.opens_mounts or num_sent < self._job.spec.num_nodes:
            return
        job, records = self._files, Records(self._files.path.parents[1])
        shared = {link.target for link in shared_links(job)}
        for link in shared_links(job):
            scratch = JobFolder(Path(self._mounts.common_path(link.key)))
            create_links([one for one in moved_links(job, scratch) if one.target in shared], job, records)
        step.order(opens_mounts=True)

    def _upload(self, step: Step) -> Iterator[JobEvent]:
        """Give the nodes the terms of their uploads, and yield what is missing."""
        until_unix_s = self._timers.notice_until_unix_s
        notice_unix_s = None if until_unix_s is None else self._clock.machine_unix_s(until_unix_s)
        leaves = self._leaves_machines()
        step.order(
            uploads=UploadTerms(self._mounts.until_unix_s(self.state, notice_unix_s, leaves=leaves), leaves)
        )
        reports = sorted(step.reports.items())
        missing = "; ".join(f"node {node}: {one.uploading}" for node, one in reports if one.uploading)
        if missing and self.state.status in (JobStatus.RUNNING, JobStatus.WINDING_DOWN):
            yield Uploading(self.state.attempt, missing)

    def _leaves_machines(self) -> bool:
        """Return True if the job ends with this attempt, or continues on other machines."""
        event = AttemptExited(self.state.attempt, self._has_advanced())
        after, _ = advance(self.state, self._timers, event, self._job.policy, self._clock.unix_s())
        own = own_ends(dict(enumerate(self._outcomes()))).values()
        return (
            after.status.is_final
            or self._mounts.limit_unix_s is not None
            or self.state.is_noticed
            or any(one.is_lost or one.is_preempted or one.unfit for one in own)  # because of its machines
        )

    def _outcomes(self) -> list[Outcome]:
        """Return the outcome of each node. A node without one was lost."""
        return [self.state.outcomes.get(node, Outcome(Phase.RUN)) for node in range(self._job.spec.num_nodes)]

    def _can_resume(self) -> bool:
        """Return True if only the uploads of the attempt are incomplete, and can be continued."""
        return (
            self._have_all_ended()
            and all(one.is_success for one in self.state.outcomes.values())
            and not self._mounts.is_confirmed()
            and self._mounts.limit_unix_s is None
            and not self.state.is_noticed
            and self.state.status is not JobStatus.CANCELLING
            and self._num_resumed < _MAX_SILENT
        )

    def _end_attempt(self) -> Iterator[JobEvent]:
        """Yield the events of an attempt's end, after srun has exited."""
        assert self._step is not None
        self._step.close()
        self._step = None
        before = self.state
        num_silent = 0 if self._has_reports or before.is_noticed else self._stored.num_silent + 1
        self._stored = replace(self._stored, num_silent=num_silent)
        if num_silent >= _MAX_SILENT:  # nodes that never send a message are not just lost machines
            yield ControllerFailed(
                f"srun could not start the nodes, {num_silent} times (see {self._files.output})"
            )
            return
        self._mounts.read_ends(self._files, before.attempt)
        if self._can_resume():  # only runners were lost: others take their places
            self._num_resumed += 1
            self._is_started = False
            return
        leaves = self._leaves_machines()
        lost = self._mounts.missing(with_settled=False) if leaves else ""
        yield AttemptExited(before.attempt, self._has_advanced(), lost, self._cause())
        if self.state.status is JobStatus.RECOVERING and leaves:
            self._requeue()

    def _requeue(self) -> None:
        """Let Slurm start the job again, on the machines that it then finds."""
        self._is_requeued = True
        self._store()
        if any(one.is_lost for one in self._outcomes()):
            commands.sweep(self._job.spec.num_nodes, self._files.path)
        # Cancelling in Slurm has priority, and a requeue would undo a user's scancel. A job that Slurm itself
        # has requeued is not running any more either.
        queued = _with_retries(lambda: commands.query_queue([self._slurm_id])).get(self._slurm_id)
        if queued is not None and queued.state == "RUNNING":
            left_out = self._choose_left_out()
            _with_retries(lambda: commands.requeue(self._slurm_id))
            self._leave_out(left_out)

    # -- nodes that stand out --------------------------------------------------------------------------------
    def _choose_left_out(self) -> tuple[str, ...]:
        return choose_left_out(
            self._files.path.parents[1],
            self._files.batch_script,
            self._job.spec,
            partition=os.environ.get("SLURM_JOB_PARTITION", ""),
        )

    def _is_on_excluded(self) -> bool:
        """Return True, once per node, if the job has a node that stands out."""
        # Slurm itself starts a job again whose first node has failed, and does not leave that node out.
        unwanted = set(self._choose_left_out()) - set(self._stored.left_out)
        found = unwanted & set(_own_names()) if unwanted else set[str]()
        if found:
            _log.warning("requeued, to leave out %s: see `holdfast nodes`", ", ".join(sorted(found)))
            self._store(left_out=(*self._stored.left_out, *sorted(found)))
        return bool(found)

    def _leave_out(self, names: tuple[str, ...]) -> None:
        """Have Slurm leave nodes out of the next start. It ends this process soon, so it is asked at once."""
        nodes = joined(names, self._job.spec.exclude)
        try:
            try:
                commands.leave_out(self._slurm_id, nodes)
            except RetryLater:  # Slurm's signal to all processes has killed scontrol, or it was refused
                commands.leave_out(self._slurm_id, nodes)
        except RetryLater as error:
            _log.warning("no node is left out: %s", error)

    # -- waiting ---------------------------------------------------------------------------------------------
    @override
    def _wait(self) -> None:
        select.select([self._woken, *([] if self._step is None else [self._step.fd])], [], [], _POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)


def _own_names() -> tuple[str, ...]:
    """Return the names of the job's nodes, by rank."""
    return _with_retries(lambda: commands.node_names(os.environ["SLURM_JOB_NODELIST"]))


def _with_retries(call: Callable[[], _T]) -> _T:
    """Call Slurm, with retries for some minutes while its own controller is down."""
    for _ in range(_MAX_RETRIES - 1):
        try:
            return call()
        except RetryLater as error:
            _log.warning("retrying in %.0f s: %s", _RETRY_S, error)
            time.sleep(_RETRY_S)
    return call()
