"""The state machine of a job: (state, event) -> (state, actions). Pure: no clock, process or disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.jobs.failure_cause import MAX_SAME, FailureCause, is_same
from holdfast.jobs.outcome import Outcome, Phase, own_ends
from holdfast.jobs.status import JobStatus
from holdfast.system import backoff

MAX_BARREN = 5
"""Attempts in a row that may exit by themselves without a newer checkpoint before the job fails."""
MAX_WAIT_S = 60.0  # longest backoff between two attempts
PEERS_S = 5.0  # time that other nodes have to exit after one has failed, so that they can log the error too
GRACE_S = 30.0  # default time limit for a job's last save


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Rules for restarting a job."""

    num_nodes: int = 1
    max_restarts: int = 0  # after the job's own errors
    free_codes: frozenset[int] = frozenset()  # exit codes after which restarts are not counted
    max_barren: int = MAX_BARREN
    max_same: int = MAX_SAME  # attempts in a row with the same cause; 0: no limit
    grace_s: float = GRACE_S


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job, which determines all further actions."""

    status: JobStatus = JobStatus.PENDING
    attempt: int = 0  # number of the newest attempt
    is_active: bool = False  # processes of that attempt may exist
    recoveries: int = 0  # attempts started because the previous one ended early
    num_errors: int = 0  # of these, after the job's own errors
    num_barren: int = 0  # attempts in a row that exited by themselves without a newer checkpoint
    num_hurried: int = 0  # attempts in a row without a newer checkpoint, for any reason
    hung: str = ""  # place at which the training of the last attempt hung
    cause: FailureCause | None = None  # of the job's last own error, without a newer checkpoint since
    num_same: int = 0  # errors with that cause in a row
    is_noticed: bool = False  # the attempt has received a preemption notice
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)  # outcomes of the attempt, by node
    reason: str = ""  # why the job has its status, for people


# -- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ControllerStarted:
    """A controller has started."""


@dataclass(frozen=True, slots=True)
class NodesRunning:
    """Every node has started `run`."""

    attempt: int


@dataclass(frozen=True, slots=True)
class NodeExited:
    """The commands of a node have exited, or the node was lost."""

    attempt: int
    node: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Uploading:
    """All nodes have exited, but some of their files are not uploaded yet."""

    attempt: int
    what: str  # missing files, for people


@dataclass(frozen=True, slots=True)
class AttemptExited:
    """No process of the attempt is left."""

    attempt: int
    has_advanced: bool | None  # True if there is a newer checkpoint; None if steps were never reported
    lost_uploads: str = ""  # files that are not in their buckets, on machines that are given back; for people
    cause: FailureCause | None = None  # of the job's own error, if its output shows one


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """The machine will be reclaimed."""

    lead_s: float
    source: str = "holdfast preempt"


@dataclass(frozen=True, slots=True)
class NoticeDelivered:
    """The notice was sent to all nodes."""

    attempt: int
    num_listening: int  # processes with a handler for it


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A user has cancelled the job."""


@dataclass(frozen=True, slots=True)
class BackoffElapsed:
    """The backoff before the next attempt is over."""


@dataclass(frozen=True, slots=True)
class StartDelayed:
    """The job does not fit beside those that are running, or others come first."""

    why: str


@dataclass(frozen=True, slots=True)
class PredecessorFailed:
    """The task before this one in a pipeline has ended without success."""

    why: str


@dataclass(frozen=True, slots=True)
class ControllerFailed:
    """The controller cannot continue."""

    why: str


JobEvent = (
    ControllerStarted
    | NodesRunning
    | NodeExited
    | Uploading
    | AttemptExited
    | NoticeReceived
    | NoticeDelivered
    | CancelRequested
    | BackoffElapsed
    | StartDelayed
    | PredecessorFailed
    | ControllerFailed
)


# -- orders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Start an attempt on all nodes."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send all nodes of the attempt a preemption notice."""

    lead_s: float
    source: str


@dataclass(frozen=True, slots=True)
class KillAttempt:
    """Kill all processes of the attempt after a delay. The earliest deadline counts."""

    after_s: float
    with_keepers: bool = False  # including keepers with staged saves, as the machine is gone


@dataclass(frozen=True, slots=True)
class Backoff:
    """Wait before the next attempt."""

    seconds: float


Action = StartAttempt | SendNotice | KillAttempt | Backoff
Transition = tuple[JobState, tuple[Action, ...]]


# -- the machine -----------------------------------------------------------------------------------------


def advance(state: JobState, event: JobEvent, policy: RestartPolicy) -> Transition:
    """Return the state after an event, and the actions to take.

    Events of earlier attempts, and any event of a job that has ended, change nothing.
    """
    if state.status.is_final or _is_stale(state, event):
        return state, ()
    return _HANDLERS[type(event)](state, event, policy)


def _is_stale(state: JobState, event: JobEvent) -> bool:
    """Return True for an event of an earlier attempt."""
    return isinstance(event, (NodesRunning, NodeExited, Uploading, AttemptExited, NoticeDelivered)) and (
        event.attempt != state.attempt or not state.is_active
    )


def _start(state: JobState, event: ControllerStarted | BackoffElapsed, policy: RestartPolicy) -> Transition:
    awaited = JobStatus.PENDING if isinstance(event, ControllerStarted) else JobStatus.RECOVERING
    if state.status is not awaited or state.is_active:
        return state, ()
    number = state.attempt + 1
    status = JobStatus.STARTING if number == 1 else JobStatus.RECOVERING
    state = dataclasses.replace(
        state,
        status=status,
        attempt=number,
        is_active=True,
        is_noticed=False,
        outcomes={},
        recoveries=state.recoveries + (number > 1),
        reason=state.reason if number > 1 else "",
    )
    return state, (StartAttempt(number),)


def _wait_on(state: JobState, event: StartDelayed | PredecessorFailed, policy: RestartPolicy) -> Transition:
    """Let a job that has not started wait on, or cancel it."""
    if state.status is not JobStatus.PENDING:
        return state, ()
    status = JobStatus.CANCELLED if isinstance(event, PredecessorFailed) else JobStatus.PENDING
    return dataclasses.replace(state, status=status, reason=event.why), ()


def _nodes_run(state: JobState, event: NodesRunning, policy: RestartPolicy) -> Transition:
    if state.status in (JobStatus.STARTING, JobStatus.RECOVERING):
        return dataclasses.replace(state, status=JobStatus.RUNNING, reason=""), ()
    return state, ()


def _node_exited(state: JobState, event: NodeExited, policy: RestartPolicy) -> Transition:
    if event.node in state.outcomes:
        return state, ()
    outcome = event.outcome
    state = dataclasses.replace(state, outcomes={**state.outcomes, event.node: outcome})
    if len(state.outcomes) == policy.num_nodes:
        return state, (KillAttempt(0.0),)
    if outcome.is_success or outcome.is_stopped:
        return state, ()
    return state, (KillAttempt(_peers_s(state, outcome, policy)),)


def _peers_s(state: JobState, outcome: Outcome, policy: RestartPolicy) -> float:
    """Return how long the other nodes may continue after one has exited."""
    if outcome.is_lost or outcome.unfit or outcome.killed_by is not None:
        return 0.0  # the others wait for a node that never responds
    if outcome.is_preempted or state.is_noticed or state.status is JobStatus.CANCELLING:
        return policy.grace_s  # the others may be saving
    return PEERS_S


def _uploading(state: JobState, event: Uploading, policy: RestartPolicy) -> Transition:
    succeeded = [one for one in state.outcomes.values() if one.is_success]
    if state.status is JobStatus.CANCELLING or len(succeeded) < policy.num_nodes:
        return state, ()
    return dataclasses.replace(state, status=JobStatus.WINDING_DOWN, reason=event.what), ()


def _notice(state: JobState, event: NoticeReceived, policy: RestartPolicy) -> Transition:
    if not state.is_active or state.status in (JobStatus.CANCELLING, JobStatus.WINDING_DOWN):
        return state, ()
    reason = f"preemption notice ({event.source})"
    state = dataclasses.replace(state, is_noticed=True, reason=reason)
    return state, (SendNotice(event.lead_s, event.source), KillAttempt(event.lead_s, with_keepers=True))


def _cancel(state: JobState, event: CancelRequested, policy: RestartPolicy) -> Transition:
    if state.status is JobStatus.CANCELLING:
        return state, ()
    if not state.is_active:
        return dataclasses.replace(state, status=JobStatus.CANCELLED, reason="cancelled"), ()
    state = dataclasses.replace(state, status=JobStatus.CANCELLING, reason="cancelled")
    return state, (SendNotice(policy.grace_s, "holdfast cancel"), KillAttempt(policy.grace_s))


def _notice_delivered(state: JobState, event: NoticeDelivered, policy: RestartPolicy) -> Transition:
    """Kill a cancelled job at once if none of its processes handles the notice."""
    in_vain = state.status is JobStatus.CANCELLING and not event.num_listening
    return state, (KillAttempt(0.0),) if in_vain else ()


def _controller_failed(state: JobState, event: ControllerFailed, policy: RestartPolicy) -> Transition:
    orders = (KillAttempt(0.0),) if state.is_active else ()
    return dataclasses.replace(state, status=JobStatus.FAILED_CONTROLLER, reason=event.why), orders


# -- what comes after an attempt -------------------------------------------------------------------------


def _attempt_exited(state: JobState, event: AttemptExited, policy: RestartPolicy) -> Transition:
    lost = event.lost_uploads
    state = dataclasses.replace(state, is_active=False)
    if state.status is JobStatus.CANCELLING:
        return dataclasses.replace(state, status=JobStatus.CANCELLED), ()
    outcomes = {node: state.outcomes.get(node, Outcome(Phase.RUN)) for node in range(policy.num_nodes)}
    if all(one.is_success for one in outcomes.values()):
        if lost:  # the results of the work are not where they belong, so it is repeated
            return _recover(state, lost, event, policy, is_barren=True, is_external=True)
        return dataclasses.replace(state, status=JobStatus.SUCCEEDED, reason=""), ()
    own = own_ends(outcomes).values()
    summary = describe_outcomes(outcomes)
    last_hung, hung = state.hung, next((one.hung for one in own if one.is_hung), "")
    state = dataclasses.replace(state, hung=hung)
    if hung and hung == last_hung and not event.has_advanced:
        reason = f"the training hung twice at the same place, without a newer checkpoint: {hung}"
        return dataclasses.replace(state, status=JobStatus.FAILED, reason=reason), ()
    if any(one.diverged for one in own):  # a restart would resume in the same spike
        return dataclasses.replace(state, status=JobStatus.FAILED, reason=summary), ()
    if state.is_noticed or any(one.is_lost for one in own):
        why = _joined(state.reason if state.is_noticed else summary, lost)
        return _recover(state, why, event, policy, is_barren=False, is_external=True)
    if any(one.is_preempted or one.is_hung or one.unfit or one.code in policy.free_codes for one in own):
        # Nothing else limits these: a job that never reports its steps must not restart forever either.
        return _recover(state, _joined(summary, lost), event, policy, is_barren=True)
    why = f"{summary}: {event.cause.error}" if event.cause and event.cause.error else summary
    in_setup = any(one.phase is Phase.SETUP for one in own)
    failed = JobStatus.FAILED_SETUP if in_setup else JobStatus.FAILED
    state = _with_cause(state, event)
    if policy.max_same and state.num_same >= policy.max_same and state.cause is not None:
        reason = (
            f"{state.num_same} attempts in a row failed in the same way, without a newer checkpoint: "
            f"{state.cause.what} ({summary})"
        )
        return dataclasses.replace(state, status=failed, reason=reason), ()
    if state.num_errors >= policy.max_restarts:
        spent = (
            f"; all {policy.max_restarts} restarts after errors are used up" if policy.max_restarts else ""
        )
        return dataclasses.replace(state, status=failed, reason=why + spent), ()
    state = dataclasses.replace(state, num_errors=state.num_errors + 1)
    return _recover(state, _joined(why, lost), event, policy, is_barren=event.has_advanced is not None)


def _with_cause(state: JobState, event: AttemptExited) -> JobState:
    """Return the state with the cause of an own error and its repetitions."""
    if event.has_advanced:
        return state
    same = is_same(state.cause, event.cause, at_same_step=event.has_advanced is False)
    return dataclasses.replace(state, cause=event.cause, num_same=state.num_same + 1 if same else 1)


def _joined(why: str, lost: str) -> str:
    return "; ".join(filter(None, (why, lost)))


def _recover(
    state: JobState,
    why: str,
    event: AttemptExited,
    policy: RestartPolicy,
    *,
    is_barren: bool,
    is_external: bool = False,
) -> Transition:
    num_barren = num_hurried = 0
    if event.has_advanced:
        state = dataclasses.replace(state, cause=None, num_same=0)
    else:
        num_barren, num_hurried = state.num_barren + is_barren, state.num_hurried + 1
    state = dataclasses.replace(state, num_barren=num_barren, num_hurried=num_hurried, reason=why)
    if is_barren and num_barren >= policy.max_barren:
        reason = (
            f"{why}; {num_barren} attempts in a row exited without a newer checkpoint, so "
            "the job is not restarted"
        )
        return dataclasses.replace(state, status=JobStatus.FAILED, reason=reason), ()
    pause = Backoff(pause_s(num_hurried, is_external))
    return dataclasses.replace(state, status=JobStatus.RECOVERING), (pause,)


_HANDLERS: Mapping[type[JobEvent], Callable[[JobState, Any, RestartPolicy], Transition]] = {
    ControllerStarted: _start,
    BackoffElapsed: _start,
    NodesRunning: _nodes_run,
    NodeExited: _node_exited,
    Uploading: _uploading,
    AttemptExited: _attempt_exited,
    NoticeReceived: _notice,
    NoticeDelivered: _notice_delivered,
    CancelRequested: _cancel,
    StartDelayed: _wait_on,
    PredecessorFailed: _wait_on,
    ControllerFailed: _controller_failed,
}


def pause_s(num_hurried: int, is_external: bool) -> float:
    """Return the backoff before the next attempt, in seconds.

    Args:
        num_hurried: attempts in a row without a newer checkpoint.
        is_external: the last attempt was preempted, so the first retry does not wait.
    """
    num_failures = num_hurried - is_external
    return 0.0 if num_failures < 1 else backoff.doubled(num_failures, 1.0, MAX_WAIT_S)


def describe_outcomes(outcomes: Mapping[int, Outcome]) -> str:
    """Return why the attempt ended, for people."""
    return "; ".join(f"node {node} {one.describe()}" for node, one in sorted(own_ends(outcomes).items()))


def exit_status(state: JobState) -> int:
    """Return the exit status of a job: 0 unless it has ended without success, then that of its command.

    That is the status of the first node that failed by itself, 128 and the signal for a shell that was
    killed, and 1 if there is none, as for a cancelled job.
    """
    if not state.status.is_final or state.status is JobStatus.SUCCEEDED:
        return 0
    if state.status not in (JobStatus.FAILED, JobStatus.FAILED_SETUP):
        return 1
    own = own_ends(state.outcomes)
    first = own[min(own)] if own else None
    if first is None or first.is_lost:
        return 1
    return first.code or 128 + (first.killed_by or 0)
