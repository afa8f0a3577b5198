"""The controller of a job: applies events to its state, records the result, and takes the actions due."""

from __future__ import annotations

import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

from msgspec.structs import replace

from holdfast.errors import HoldfastError
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.history import add_change
from holdfast.jobs.machines import add_events, attempt_events
from holdfast.jobs.node.checks.result import read_checks
from holdfast.jobs.notifications import announce
from holdfast.jobs.outcome import FailureCause, find_cause, own_ends
from holdfast.jobs.output import last_lines
from holdfast.jobs.records import JobRequest, Submission
from holdfast.jobs.state_machine import (
    AttemptDue,
    AttemptExited,
    CancelRequested,
    ControllerFailed,
    JobEvent,
    JobState,
    NoticeReceived,
    advance,
)
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import JobClock, Timers
from holdfast.system.environment import read_progress
from holdfast.system.failpoint import failpoint
from holdfast.system.log import get_logger

_log = get_logger("jobs")

LEAD_S = 30.0  # lead of a notice whose request has none
_NUM_LAST_LINES = 10
_FULL_BYTES = 64 << 10  # free space of a disk that counts as full, as some file systems keep that much
HEADLINE = "holdfast: "  # beginning of the first line of an attempt, which names its number
_NUM_LINES = 200
_SHOWN = attrgetter("status", "attempt", "reason")  # a change of these is recorded in the history


class Controller(ABC):
    """Controller of one job. A subclass is the port to an engine's nodes, and stores the state.

    Another controller can take over at any moment from that.
    """

    shown_machines: tuple[str, ...] = ()  # names of the attempt's machines, if it has others than this one

    def __init__(
        self,
        folder: JobFolder,
        job: Submission,
        state: JobState,
        *,
        log: Path | None = None,
        timers: Timers | None = None,
        step_before: int | None = None,
        clock: JobClock | None = None,
    ) -> None:
        self._clock = clock or JobClock()
        self._folder, self._job = folder, job
        self._own_log = log or folder.controller_log
        self._timers = timers or Timers()
        self._step_before = step_before
        self._is_started = False  # True once this process has started the attempt's nodes
        self._is_notified = self._timers.notice_until_unix_s is None
        self.state = state

    @property
    def has_ended(self) -> bool:
        """True if the job has ended."""
        return self.state.status.is_final

    def serve(self) -> None:
        """Run the job until it ends, or another controller must continue."""
        # Another controller may have been killed before it did so.
        announce(self._folder, self.state, log=self._own_log)
        self._begin()
        while not (self.has_ended or self._is_leaving()):
            self._act()
            if not self._check():  # after a change, another action may be due
                self._wait()

    def serve_or_give_up(self, *passed: type[HoldfastError]) -> None:
        """Run the job until then, or end it because of an error of the controller. Pass some errors on."""
        try:
            self.serve()
        except passed:
            raise
        except Exception as error:  # noqa: BLE001 - reported in the log and as the job's status
            traceback.print_exc()
            self._abandon()
            why = error if isinstance(error, HoldfastError) else repr(error)
            self._apply(ControllerFailed(f"{why} (see {self._own_log})"))

    def answer_requests(self) -> None:
        """Apply the open requests of commands."""
        for request in self._requests():
            lead_s = LEAD_S if request.lead_s is None else request.lead_s
            event = CancelRequested() if request.kind == "cancel" else NoticeReceived(lead_s)
            self._apply(event, request)

    @abstractmethod
    def _begin(self) -> None:
        """Take over the job from its stored state."""

    @abstractmethod
    def _is_leaving(self) -> bool:
        """Return True if another controller will continue."""

    @abstractmethod
    def _save(
        self, state: JobState, timers: Timers, *, now_unix_s: float, answered: JobRequest | None
    ) -> None:
        """Store the state and timers, and mark a request as answered, in one write."""

    @abstractmethod
    def _requests(self) -> Iterable[JobRequest]:
        """Return the open requests of commands."""

    @abstractmethod
    def _prepare_attempt(self) -> None:
        """Forget the nodes of the previous attempt."""

    @abstractmethod
    def _start_nodes(self) -> None:
        """Start the nodes of the attempt that are not running yet."""

    @abstractmethod
    def _notify_nodes(self, source: str, deadline_unix_s: float) -> JobEvent | None:
        """Send all nodes a notice. Return its result, if available at once."""

    @abstractmethod
    def _kill_nodes(self, since_unix_s: float, *, with_keepers: bool) -> None:
        """Kill all processes of the attempt, which was due at `since_unix_s` on the job's clock."""

    @abstractmethod
    def _receive_signals(self) -> None:
        """Apply the notices that this machine has received."""

    @abstractmethod
    def _node_events(self) -> Iterable[JobEvent]:
        """Return the events of the attempt's nodes. Each is applied before the next is requested."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait until something happens or is due."""

    @abstractmethod
    def _abandon(self) -> None:
        """Kill what is running, without waiting for anything."""

    @abstractmethod
    def _node_machines(self) -> tuple[str, ...]:
        """Return the names of the attempt's machines, by rank; empty if unknown."""

    def _gone_machines(self, names: tuple[str, ...]) -> frozenset[str]:
        """Return which of some machines the engine has found to have failed."""
        return frozenset()

    def _start_if_due(self) -> None:  # noqa: B027 - only jobs of some engines wait
        """Start the first attempt, if the job waits and nothing is in its way."""

    def _missing_uploads(self) -> str:
        """Return which files of a job that has just ended are not uploaded."""
        return ""

    def _apply(self, event: JobEvent, answered: JobRequest | None = None) -> None:
        """Apply an event. The new state is stored before any action is taken."""
        before, timers_before = self.state, self._timers
        now_unix_s = self._clock.unix_s()
        state, timers = advance(before, timers_before, event, self._job.policy, now_unix_s)
        if isinstance(event, AttemptExited) and before.is_active and not state.is_active:
            self._record_machines(before)
        state = self._with_details(state)
        if state.attempt != before.attempt:
            self._step_before = self._newest_step()
        is_change = _SHOWN(state) != _SHOWN(before)
        if is_change:
            self._log_change(state)  # first, so that a reader of the status also finds its change
        if (state, timers) != (before, timers_before) or answered is not None:
            self._save(state, timers, now_unix_s=time.time(), answered=answered)
        if timers.notice_until_unix_s != timers_before.notice_until_unix_s:
            self._is_notified = timers.notice_until_unix_s is None
        self.state, self._timers = state, timers
        if is_change:
            failpoint("jobs.recorded")
            announce(self._folder, state, log=self._own_log)
        if state.attempt != before.attempt:
            self._is_started = False
            self._prepare_attempt()

    def _record_machines(self, ended: JobState) -> None:
        """Remember how the attempt has ended on each of its machines."""
        machines = self._node_machines()
        nodes = (self._folder.node(ended.attempt, rank) for rank in range(len(machines)))
        checks = {rank: read_checks(node.checks) for rank, node in enumerate(nodes)}
        gone = self._gone_machines(machines)
        events = attempt_events(machines, ended, checks, job=self._job.task_id, gone=gone)
        try:
            add_events(self._folder.path.parents[1], events)
        except OSError as error:  # the job continues without the memory of its machines
            _log.warning("cannot record the attempt in the list of nodes: %s", error)

    def _with_details(self, state: JobState) -> JobState:
        """Return the state with details of the job's end, if it has just ended."""
        status, is_new = state.status, state.status is not self.state.status
        reason = state.reason
        if is_new and status in (JobStatus.FAILED, JobStatus.FAILED_SETUP):
            disk = os.statvfs(self._folder.path)
            if disk.f_bavail * disk.f_frsize < _FULL_BYTES:
                reason = f"{reason}; no space is left on the file system of {self._folder.path}"
            rank = next(iter(own_ends(state.outcomes)), 0)  # nodes that were stopped only followed it
            lines = "\n".join(f"  {line}" for line in last_lines(self._folder.log(rank), _NUM_LAST_LINES))
            reason = f"{reason}\nThe last lines of node {rank}:\n{lines}" if lines else reason
        if status.is_final and not self.has_ended and state.attempt:
            missing = self._missing_uploads()
            reason = reason if missing in reason else "; ".join(filter(None, (reason, missing)))
        return state if reason == state.reason else replace(state, reason=reason)

    def _log_change(self, state: JobState) -> None:
        reason = state.reason.partition("\n")[0]
        line = f"attempt {state.attempt} {state.status.value} {reason}".rstrip()
        try:
            add_change(self._folder, state, machines=self.shown_machines, step=self._newest_step())
            with self._folder.changed.open("a") as file:
                file.write(f"{time.strftime('%F %T')} {line}\n")
        except OSError as error:  # only for people: the state is stored, and the job continues
            _log.warning("cannot record a change of the job's status: %s", error)

    def _act(self) -> None:
        """Take the actions that are due. A killed controller may have taken some of them already."""
        if not self.state.is_active:
            return
        if not self._is_started:
            self._start_nodes()
            self._is_started = True
        if not self._is_notified and self._timers.notice_until_unix_s is not None:
            self._is_notified = True
            # For the programs of the job, which compare it with the machine's clock.
            until_unix_s = self._clock.machine_unix_s(self._timers.notice_until_unix_s)
            if (event := self._notify_nodes(self._timers.notice_source, until_unix_s)) is not None:
                self._apply(event)
        kill_unix_s = self._timers.kill_unix_s
        if kill_unix_s is not None and self._clock.unix_s() >= kill_unix_s:
            self._kill_nodes(kill_unix_s, with_keepers=self._timers.kill_keepers)

    def _check(self) -> bool:
        """Apply all that has happened. Return True if that changed the state or timers."""
        before = (self.state, self._timers)
        self._receive_signals()
        self.answer_requests()
        if self.state.is_active:
            for event in self._node_events():
                self._apply(event)
        wake_unix_s = self._timers.wake_unix_s
        if wake_unix_s is not None and self._clock.unix_s() >= wake_unix_s and not self._is_leaving():
            self._apply(AttemptDue())
        self._start_if_due()  # last, as an attempt has no nodes to look at before its action was taken
        return (self.state, self._timers) != before

    def _cause(self) -> FailureCause | None:
        outcomes = self.state.outcomes
        failed = [rank for rank, one in own_ends(outcomes).items() if one.is_failed_command]
        if not failed:
            return None
        lines = last_lines(self._folder.log(min(failed)), _NUM_LINES)
        begin = 0  # of the newest attempt, without its first line
        for number, line in enumerate(lines, 1):
            if line.startswith(HEADLINE) and " attempt " in line and " starts" in line:
                begin = number
        return find_cause(outcomes, lines[begin:])

    def _newest_step(self) -> int | None:
        return read_progress(self._folder.progress).newest_step

    def _has_advanced(self) -> bool | None:
        """Return True if the attempt made a newer checkpoint; None if the job never reported one."""
        step, before = self._newest_step(), self._step_before
        return None if step is None else before is None or step > before
