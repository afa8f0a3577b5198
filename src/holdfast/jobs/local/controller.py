"""The controller of a job on this machine, and the nodes of an attempt, which are process trees."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from holdfast.errors import Conflict, Corrupt, HoldfastError, NotFound, RetryLater
from holdfast.jobs.controller import LEAD_S, Controller
from holdfast.jobs.environment import container_base, tag
from holdfast.jobs.folder import JobFolder, NodeFolder, job_folder
from holdfast.jobs.journal import write_document
from holdfast.jobs.local.claims import choose_port, lead_on, locked, read_claims
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.container import release_containers
from holdfast.jobs.node.job_secrets import check_has_secrets, has_secrets, remove_secrets
from holdfast.jobs.node.mounts.attempt import Mounts
from holdfast.jobs.node.mounts.mount_records import caches, create_links, remove_links, visible_links
from holdfast.jobs.node.preparation import make_node_spec
from holdfast.jobs.node.processes import AGENT, Process
from holdfast.jobs.node.roles import STOPPED, rouse_controller, spawn, start_controller
from holdfast.jobs.node_spec import NodeSpec, machine_name, read_environment, read_outcome
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.records import JobRecord, JobRequest, Records
from holdfast.jobs.state_machine import (
    AttemptDue,
    AttemptExited,
    JobEvent,
    JobState,
    NodeExited,
    NodesRunning,
    NoticeDelivered,
    NoticeReceived,
    PredecessorFailed,
    StartDelayed,
    Uploading,
)
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import JobClock, Timers
from holdfast.system.linux import locks
from holdfast.system.linux.processes import adopt_orphans
from holdfast.system.linux.wakeup_pipe import WakeupPipe
from holdfast.system.log import get_logger
from holdfast.watch.preemption.sources import Notice, write_notice

_log = get_logger("jobs")

_UNKNOWN_S = 0.05  # interval for checking a process that is about to write or to exit
_AGAIN_S = 1.0  # interval for checking whether all killed processes are gone
_OTHERS_S = 5.0  # interval for checking the jobs that this one waits for, whose end wakes this controller too


def supervise(state: Path, number: int) -> bool:
    """Run the controller of a job, whose lock the caller holds. Return True if it needs none for now."""
    records, folder = Records(state), job_folder(state, number)
    try:
        with closing(LocalController(records, folder, records.get(number))) as controller:
            controller.serve_or_give_up(RetryLater)
        if controller.has_ended:
            _clean_up(records, folder, number)
            lead_on(records, state)
    except (NotFound, Corrupt, Conflict, RetryLater) as error:
        # The record is damaged, or a disk failed. Running nodes continue, and the next command starts a new
        # controller.
        _log.error("job %s: controller stopped: %s", number, error)
        return False
    return controller.is_idle


def resume_if_due(state: Path, number: int) -> None:
    """Start another controller, if one became necessary just when the last one ended."""
    try:
        records = Records(state)
        if records.requests(records.get(number)) or number in read_claims(records, state).leading:
            start_controller(job_folder(state, number))
    except HoldfastError as error:
        _log.error("job %s: %s", number, error)  # the next command looks again


def cancel_without_controller(records: Records, folder: JobFolder, number: int) -> bool:
    """Cancel a job that has not started and has no controller. Return True if it was one."""
    with locks.held(folder.lock) as lock:
        if lock is None or records.get(number).state.job_state.status is not JobStatus.PENDING:
            return False
        records.ask(number, "cancel", None)
        with closing(LocalController(records, folder, records.get(number))) as controller:
            controller.answer_requests()
        if controller.has_ended:
            _clean_up(records, folder, number)
        return controller.has_ended


def _clean_up(records: Records, folder: JobFolder, number: int) -> None:
    """Remove what a running job needs, and let the next job of its pipeline proceed."""
    remove_links(folder)
    try:
        release_containers(folder)
    except OSError as error:  # the next command tries again
        _log.error("cannot release the containers of the job in %s: %s", folder.path, error)
    remove_secrets(folder)
    _wake_successors(records, folder, number)
    if caches(folder):
        # Here, because it takes as long to import as all else, and most jobs do not need it.
        from holdfast.jobs.node.mounts.uploads import remove_copies

        remove_copies(folder)


def _wake_successors(records: Records, folder: JobFolder, number: int) -> None:
    """Wake the controllers of the jobs after this one, or start them."""
    for record in records.successors(number):
        if not record.state.job_state.status.is_final:
            rouse_controller(job_folder(folder.path.parents[1], record.job.number))


class LocalController(Controller):
    """Controller of a job on this machine, which holds the job's lock."""

    def __init__(self, records: Records, folder: JobFolder, record: JobRecord) -> None:
        self._records = records
        self._record = record
        super().__init__(
            folder,
            record.job,
            record.state.job_state,
            timers=record.state.due,
            step_before=record.state.step_before,
            clock=JobClock(record.state.clock),
        )
        self._is_terminated = False  # this machine or process is to end: another controller continues
        self._is_next = False  # the job before this one has ended, but its controller is still running
        self.is_idle = False
        """True if the job waits for its claim behind another one, and needs no controller for now."""
        self._watch_attempt()
        self._wakeup = WakeupPipe(folder.wakeup)

    def close(self) -> None:
        """Release descriptors. Running nodes continue."""
        self._nodes.close()
        self._wakeup.close()

    @override
    def _begin(self) -> None:
        adopt_orphans()
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_terminated", True))
        signal.set_wakeup_fd(self._wakeup.fd, warn_on_full_buffer=False)  # a signal wakes the loop too
        if self.state.status is JobStatus.PENDING and not self._is_waiting:
            self._apply(AttemptDue())

    # -- before the first attempt ----------------------------------------------------------------------------
    @property
    def _is_waiting(self) -> bool:
        """True if the job waits for another one in its pipeline, or for its claim."""
        may_wait = self._job.spec.after is not None or self._job.spec.needs_claim
        return may_wait and self.state.status is JobStatus.PENDING

    @override
    def _start_if_due(self) -> None:
        self._is_next = False
        if not self._is_waiting:
            return
        after = self._job.spec.after
        event = AttemptDue() if after is None else self._predecessor_event(after)
        if isinstance(event, AttemptDue) and self._job.spec.needs_claim:
            self._start_with_claim()
        elif event is not None:
            self._apply(event)

    def _start_with_claim(self) -> None:
        """Take the job's claim and start it, or record why it waits."""
        state = self._folder.path.parents[1]
        with locked(state):
            claims = read_claims(self._records, state)
            gpus = claims.given.get(self._job.number)
            if gpus is not None:
                port = choose_port(self._folder.path, claims.ports) if self._job.spec.needs_port else None
                self._record = self._record.with_state(gpus=gpus, port=port)
                self._apply(AttemptDue())  # recorded before another job can take the same
        if gpus is not None:
            lead_on(self._records, state)
            return
        self._apply(StartDelayed(claims.shortages.get(self._job.number, "")))
        self.is_idle = self._job.number not in claims.leading
        if not self.is_idle:
            for number in claims.holders:
                start_controller(job_folder(state, number))  # a job that is dead would keep its claim
            lead_on(self._records, state, besides=self._job.number)

    def _predecessor_event(self, after: int) -> JobEvent | None:
        """Return the event of the end of the job before this one in its pipeline."""
        try:
            before = self._records.get(after)
        except NotFound:
            return PredecessorFailed(f"job {after}, which comes first, does not exist")
        status = before.state.job_state.status
        folder = job_folder(self._folder.path.parents[1], after)
        if not status.is_final:
            # Whichever of the two controllers is killed, the other one starts it again.
            start_controller(folder)
            return None
        if locks.is_held(folder.lock):  # its controller is removing its links
            self._is_next = True
            return None
        if status is JobStatus.SUCCEEDED:
            return AttemptDue()
        return PredecessorFailed(f"job {after} ({before.job.name}), which comes first, is {status.value}")

    # -- stored state ----------------------------------------------------------------------------------------
    @override
    def _is_leaving(self) -> bool:
        has_nodes = self.state.is_active and self.state.status is not JobStatus.WINDING_DOWN
        return self.is_idle or (self._is_terminated and not has_nodes)

    @override
    def _save(
        self, state: JobState, timers: Timers, *, now_unix_s: float, answered: JobRequest | None
    ) -> None:
        done = self._record.state.answered
        record = self._record.with_state(
            unix_s=now_unix_s,
            job_state=state,
            due=timers,
            step_before=self._step_before,
            clock=self._clock.read(),
            answered=done if answered is None else (*done, answered.id),
        )
        self._record = self._records.save(record)

    @override
    def _requests(self) -> list[JobRequest]:
        return self._records.requests(self._record)

    @override
    def _prepare_attempt(self) -> None:
        self._nodes.close()
        self._watch_attempt()

    def _watch_attempt(self) -> None:
        job, attempt = self._job, self.state.attempt
        self._nodes = Nodes(self._folder, job.task_id, attempt, job.spec.num_nodes)
        self._mounts = Mounts(self._folder, attempt)

    # -- actions ---------------------------------------------------------------------------------------------
    @override
    def _start_nodes(self) -> None:
        if not self._folder.attempt(self.state.attempt).exists():
            check_has_secrets(self._folder)
            processes.end_other_attempts(self._job.task_id, self.state.attempt)
        elif not has_secrets(self._folder):
            return  # the job had ended, and its state was lost: the outcomes of its nodes are read again
        create_links(visible_links(self._folder), self._folder, self._records)
        self._nodes.start(make_specs(self._record, self.state, self._folder))
        _wake_successors(self._records, self._folder, self._job.number)

    @override
    def _notify_nodes(self, source: str, deadline_unix_s: float) -> JobEvent | None:
        self._nodes.poll(self._killed_unix_s())
        return NoticeDelivered(self.state.attempt, self._nodes.notify(source))

    @override
    def _kill_nodes(self, since_unix_s: float, *, with_keepers: bool) -> None:
        self._nodes.poll(self._killed_unix_s())  # a node that has exited by now did so by itself
        self._nodes.kill(with_keepers=with_keepers)

    def _killed_unix_s(self) -> float | None:
        """Return the deadline of the attempt on the machine's clock, which also dates files."""
        killed_unix_s = self._timers.kill_unix_s
        return None if killed_unix_s is None else self._clock.machine_unix_s(killed_unix_s)

    @override
    def _abandon(self) -> None:
        if self.state.is_active:
            self._nodes.kill(with_keepers=False)

    # -- events ----------------------------------------------------------------------------------------------
    @override
    def _receive_signals(self) -> None:
        self._wakeup.clear()
        self._records.repair(self._record)
        processes.reap()
        if self._is_terminated and self.state.is_active and not self.state.is_noticed:
            self._apply(NoticeReceived(LEAD_S, "this machine is shutting down"))

    @override
    def _node_events(self) -> Iterator[JobEvent]:
        attempt = self.state.attempt
        self._nodes.poll(self._killed_unix_s())
        if self.state.status is not JobStatus.RUNNING and self._nodes.have_run:
            yield NodesRunning(attempt)
        outcomes = self._nodes.outcomes()
        for node, outcome in outcomes.items():
            if node not in self.state.outcomes:
                yield NodeExited(attempt, node, outcome)
        if len(outcomes) == self._job.spec.num_nodes:
            self._nodes.kill(with_keepers=False)
            until_unix_s = self._upload_until_unix_s()
            if self._mounts.is_over(until_unix_s, self._nodes.have_keepers):
                if until_unix_s is None:  # the job is complete only with its files
                    self._mounts.check_hope()
                yield AttemptExited(attempt, self._has_advanced(), cause=self._cause())
            elif missing := self._mounts.missing():
                yield Uploading(attempt, missing)

    def _upload_until_unix_s(self) -> float | None:
        """Return the deadline for uploads of the attempt. None: wait without limit."""
        if self.state.status is JobStatus.CANCELLING:
            return 0.0  # it uploads in the background
        is_complete = all(one.is_success for one in self.state.outcomes.values())
        until_unix_s = self._timers.notice_until_unix_s
        if is_complete or until_unix_s is None:
            return None if is_complete else 0.0  # a job that is restarted keeps its files on this machine
        return self._clock.machine_unix_s(until_unix_s)

    @override
    def _missing_uploads(self) -> str:
        return self._mounts.last_missing()

    @override
    def _node_machines(self) -> tuple[str, ...]:
        return (machine_name(),) * self._job.spec.num_nodes

    # -- waiting ---------------------------------------------------------------------------------------------
    @override
    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self._wakeup.fd, *self._nodes.fds()):
            poll.register(fd, select.POLLIN)
        poll.poll(self._timeout_ms())

    def _timeout_ms(self) -> float | None:
        if self.state.is_active and self._nodes.has_unknown:
            return _UNKNOWN_S * 1000
        if self._nodes.is_killed and self.state.is_active:
            return _AGAIN_S * 1000  # agents wake the loop when done, but one may just have started `run`
        if self._is_waiting:
            return (_UNKNOWN_S if self._is_next else _OTHERS_S) * 1000
        due_unix_s = self._timers.next_unix_s()
        return None if due_unix_s is None else max(0.0, due_unix_s - self._clock.unix_s()) * 1000


_SWEEP_S = 60.0  # time limit for killing processes that do not disappear


class _Node(Struct):
    folder: NodeFolder
    agent: Process | None = None  # None: exited, or not yet known
    fd: int | None = None  # pidfd of the agent
    outcome: Outcome | None = None

    def watch(self, agent: Process | None) -> None:
        """Begin to watch the agent."""
        self.agent, self.fd = agent, None if agent is None else processes.open_pidfd(agent)

    def let_go(self) -> None:
        """Stop watching."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self.agent is not None:
            with contextlib.suppress(ChildProcessError):  # an adopted agent is not a child
                os.waitpid(self.agent.pid, os.WNOHANG)


class Nodes:
    """Nodes of an attempt. A new controller finds their state in their folders."""

    def __init__(self, folder: JobFolder, task_id: str, attempt: int, num_nodes: int) -> None:
        self._folder = folder
        self._task_id = task_id
        self._attempt = attempt
        self._nodes = [_Node(folder.node(attempt, rank)) for rank in range(num_nodes)]
        self.is_killed = False  # the attempt was killed here. Its agents report that

    def close(self) -> None:
        """Stop watching."""
        for node in self._nodes:
            node.let_go()

    def start(self, make_specs: list[NodeSpec]) -> None:
        """Start the agents of all nodes that do not have one yet."""
        for node, plan in zip(self._nodes, make_specs, strict=True):
            if node.folder.plan.exists():
                continue
            node.folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locks.held(node.folder.lock) as lock:  # which the agent holds from its start
                assert lock is not None, "no other process starts the agents of this job"
                write_document(node.folder.plan, plan)  # from here on the node exists, with its lock held
                pid = spawn(AGENT, node.folder.path, Path(plan.log), lock=lock)
            node.watch(processes.find(pid))

    def fds(self) -> list[int]:
        """Return descriptors that become readable when an agent exits."""
        return [node.fd for node in self._nodes if node.fd is not None]

    def poll(self, killed_unix_s: float | None) -> None:
        """Update the outcome of each node. Failures after `killed_unix_s` were caused by the kill."""
        for node in self._nodes:
            if node.outcome is None:
                self._poll_node(node, killed_unix_s)

    def _poll_node(self, node: _Node, killed_unix_s: float | None) -> None:
        is_alive = locks.is_held(node.folder.lock)  # first, as the outcome is written under the lock
        if is_alive and node.agent is None:
            found = processes.of_role(AGENT, node.folder.path)
            pids = {process.pid for process in found}  # its children have its command line until they exec
            node.watch(next((process for process in found if process.parent not in pids), None))
        outcome = read_outcome(node.folder.ended)
        if outcome is None and not is_alive:
            outcome = Outcome(Phase.RUN if node.folder.running.exists() else Phase.SETUP)
        if outcome is None:
            return
        if not (outcome.is_success or outcome.is_lost or killed_unix_s is None):
            # Within the resolution of timestamps, a failure after the kill was caused by it.
            is_after = node.folder.ended.stat().st_mtime >= killed_unix_s - 0.01
            outcome = replace(outcome, is_stopped=is_after)
        node.outcome = outcome
        node.let_go()

    @property
    def has_unknown(self) -> bool:
        """True if an agent is about to run or to end: it has its lock, but not yet its own command line."""
        return any(node.outcome is None and node.agent is None for node in self._nodes)

    @property
    def have_run(self) -> bool:
        """True if every node has started `run`."""
        return all(node.folder.running.exists() for node in self._nodes)

    def outcomes(self) -> Mapping[int, Outcome]:
        """Return the outcomes of the nodes that have exited."""
        return {rank: node.outcome for rank, node in enumerate(self._nodes) if node.outcome is not None}

    def notify(self, source: str) -> int:
        """Send every node a notice, as a file and SIGTERM. Return how many processes handle SIGTERM."""
        for node in self._nodes:
            if node.outcome is None:
                with contextlib.suppress(FileNotFoundError):  # the node was never started
                    write_notice(node.folder.notice, Notice(source))
        agents = [one.agent for one in self._nodes if one.agent is not None and one.outcome is None]
        listening = [process for agent in agents for process in processes.topmost_handlers(agent.pid)]
        return sum(processes.send(process, signal.SIGTERM) for process in listening)

    def kill(self, *, with_keepers: bool) -> None:
        """Kill all processes of the attempt except the agents, which report that and exit."""
        self.is_killed = True
        with contextlib.suppress(FileNotFoundError):  # nothing was started
            (self._folder.attempt(self._attempt) / STOPPED).touch()  # for agents that wait for their mounts
        deadline = time.monotonic() + _SWEEP_S
        while (left := self.left(with_keepers=with_keepers)) and time.monotonic() < deadline:
            processes.kill(left)

    def left(self, *, with_keepers: bool = False) -> list[Process]:
        """Return the running processes of the attempt without agents, and without keepers unless included."""
        table = processes.snapshot()
        found = {one.pid: one for one in processes.tagged(tag(self._task_id, self._attempt), table)}
        agents = {node.agent.pid for node in self._nodes if node.agent is not None}
        for pid in (*(agents & table.keys()), os.getpid()):  # children of a dead agent are reparented to us
            found.update((one.pid, one) for one in processes.descendants(pid, table))
        return [
            one
            for one in found.values()
            if one.pid not in agents and one.pid != os.getpid() and (with_keepers or not one.exits_by_itself)
        ]

    def have_keepers(self) -> bool:
        """Return True if keepers or uploaders of the attempt are still running."""
        return any(one.is_keeper for one in self.left(with_keepers=True))


def addresses(num_nodes: int, job: int) -> tuple[str, ...]:
    """Return loopback addresses of the nodes, by rank. Jobs of several nodes have addresses of their own."""
    if num_nodes == 1:
        return ("127.0.0.1",)
    # Numbers that are 65024 apart share their addresses, and so do some of jobs with more than 254 nodes.
    blocks = [(job + rank // 254) % (254 * 256) for rank in range(num_nodes)]
    return tuple(
        f"127.{1 + block // 256}.{block % 256}.{1 + rank % 254}" for rank, block in enumerate(blocks)
    )


def make_specs(record: JobRecord, job_state: JobState, folder: JobFolder) -> list[NodeSpec]:
    """Return the specifications of an attempt's nodes, by rank."""
    job, spec = record.job, record.job.spec
    environment = read_environment(folder)
    if spec.image:
        environment = replace(environment, base=container_base(environment.base))
    why = f", after: {job_state.reason}" if job_state.reason else ""
    return [
        make_node_spec(
            folder,
            job,
            job_state.attempt,
            rank,
            addresses(spec.num_nodes, job.number),
            environment,
            wakeup=folder.wakeup,
            set_up=folder.set_up(rank),
            num_gpus=spec.num_gpus,
            where=(f" on node {rank}" if spec.num_nodes > 1 else "") + why,
            gpus=record.state.gpus,
            port=record.state.port,
        )
        for rank in range(spec.num_nodes)
    ]
