"""The state machine of a job: (state, timers, event) -> (state, timers). Pure: no clock, process or disk."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from holdfast.jobs.outcome import MAX_SAME, FailureCause, Outcome, Phase, is_same, own_ends
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import Timers
from holdfast.system import backoff

MAX_BARREN = 5  # attempts in a row that may exit by themselves without a newer checkpoint
MAX_WAIT_S = 60.0  # longest backoff between two attempts
PEERS_S = 5.0  # time that other nodes have to exit after one has failed, so that they can log the error too
GRACE_S = 30.0  # default time limit for a job's last save


class RestartPolicy(Struct, frozen=True):
    """Rules for restarting a job."""

    num_nodes: int = 1
    max_restarts: int = 0  # after the job's own errors
    free_codes: frozenset[int] = frozenset()  # exit codes after which restarts are not counted
    max_same: int = MAX_SAME  # attempts in a row with the same cause; 0: no limit
    grace_s: float = GRACE_S


class JobState(Struct, frozen=True):
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
    outcomes: Mapping[int, Outcome] = {}  # outcomes of the attempt, by node
    reason: str = ""  # why the job has its status, for people


class JobEvent(Struct, frozen=True):
    """Event of a job."""


class AttemptEvent(JobEvent, frozen=True):
    """Event of an attempt, without an effect in later attempts."""

    attempt: int


class AttemptDue(JobEvent, frozen=True):
    """The first attempt may start, or the next one, as its backoff is over."""


class NodesRunning(AttemptEvent, frozen=True):
    """Every node has started `run`."""


class NodeExited(AttemptEvent, frozen=True):
    """The commands of a node have exited, or the node was lost."""

    node: int
    outcome: Outcome


class Uploading(AttemptEvent, frozen=True):
    """All nodes have exited, but some of their files are not uploaded yet."""

    what: str  # missing files, for people


class AttemptExited(AttemptEvent, frozen=True):
    """No process of the attempt is left."""

    has_advanced: bool | None  # True if there is a newer checkpoint; None if steps were never reported
    lost_uploads: str = ""  # files that are not in their buckets, on machines that are given back; for people
    cause: FailureCause | None = None  # of the job's own error, if its output shows one


class NoticeReceived(JobEvent, frozen=True):
    """The machine will be reclaimed."""

    lead_s: float
    source: str = "holdfast preempt"


class NoticeDelivered(AttemptEvent, frozen=True):
    """The notice was sent to all nodes."""

    num_listening: int  # processes with a handler for it


class CancelRequested(JobEvent, frozen=True):
    """A user has cancelled the job."""


class StartDelayed(JobEvent, frozen=True):
    """The job does not fit beside those that are running, or others come first."""

    why: str


class PredecessorFailed(JobEvent, frozen=True):
    """The task before this one in a pipeline has ended without success."""

    why: str


class ControllerFailed(JobEvent, frozen=True):
    """The controller cannot continue."""

    why: str


def advance(  # noqa: C901 - a case for each event
    state: JobState, due: Timers, event: JobEvent, policy: RestartPolicy, now_unix_s: float
) -> tuple[JobState, Timers]:
    """Return the state after an event, and what is due. Events of other attempts change nothing."""
    status = state.status
    if status.is_final:
        return state, due
    if isinstance(event, AttemptEvent) and (event.attempt != state.attempt or not state.is_active):
        return state, due
    match event:
        case AttemptDue() if status in (JobStatus.PENDING, JobStatus.RECOVERING) and not state.is_active:
            return _start(state)
        case StartDelayed(why) if status is JobStatus.PENDING:
            return replace(state, reason=why), due
        case PredecessorFailed(why) if status is JobStatus.PENDING:
            return replace(state, status=JobStatus.CANCELLED, reason=why), due
        case NodesRunning() if status in (JobStatus.STARTING, JobStatus.RECOVERING):
            return replace(state, status=JobStatus.RUNNING, reason=""), due
        case NodeExited() if event.node not in state.outcomes:
            state = replace(state, outcomes={**state.outcomes, event.node: event.outcome})
            wait_s = _wait_s(state, event.outcome, policy)
            return state, due if wait_s is None else due.with_kill(now_unix_s + wait_s)
        case Uploading(what=what) if status is not JobStatus.CANCELLING:
            num_succeeded = sum(one.is_success for one in state.outcomes.values())
            if num_succeeded == policy.num_nodes:
                return replace(state, status=JobStatus.WINDING_DOWN, reason=what), due
        case AttemptExited():
            state, wait_s = _attempt_exited(state, event, policy)
            return state, due if wait_s is None else Timers(wake_unix_s=now_unix_s + wait_s)
        case NoticeReceived(lead_s, source) if state.is_active:
            if status not in (JobStatus.CANCELLING, JobStatus.WINDING_DOWN):
                state = replace(state, is_noticed=True, reason=f"preemption notice ({source})")
                return state, due.with_notice(now_unix_s + lead_s, source, kills_keepers=True)
        case NoticeDelivered(num_listening=0) if status is JobStatus.CANCELLING:
            return state, due.with_kill(now_unix_s)  # no process of the cancelled job would save
        case CancelRequested() if not state.is_active:
            return replace(state, status=JobStatus.CANCELLED, reason="cancelled"), due
        case CancelRequested() if status is not JobStatus.CANCELLING:
            state = replace(state, status=JobStatus.CANCELLING, reason="cancelled")
            return state, due.with_notice(now_unix_s + policy.grace_s, "holdfast cancel")
        case ControllerFailed(why):
            due = due.with_kill(now_unix_s) if state.is_active else due
            return replace(state, status=JobStatus.FAILED_CONTROLLER, reason=why), due
    return state, due


def _start(state: JobState) -> tuple[JobState, Timers]:
    number = state.attempt + 1
    state = replace(
        state,
        status=JobStatus.STARTING if number == 1 else JobStatus.RECOVERING,
        attempt=number,
        is_active=True,
        is_noticed=False,
        outcomes={},
        recoveries=state.recoveries + (number > 1),
        reason=state.reason if number > 1 else "",
    )
    return state, Timers()  # what was due for the attempt before is obsolete


def _wait_s(state: JobState, outcome: Outcome, policy: RestartPolicy) -> float | None:
    """Return the time that is left to other nodes after the exit of one. None: it does not end them."""
    if len(state.outcomes) == policy.num_nodes:
        return 0.0
    if outcome.is_success or outcome.is_stopped:
        return None
    if outcome.is_lost or outcome.unfit or outcome.killed_by is not None:
        return 0.0  # the others wait for a node that never responds
    if outcome.is_preempted or state.is_noticed or state.status is JobStatus.CANCELLING:
        return policy.grace_s  # the others may be saving
    return PEERS_S


def _attempt_exited(
    state: JobState, event: AttemptExited, policy: RestartPolicy
) -> tuple[JobState, float | None]:
    """Return the state after the end of an attempt, and the pause before the next one, if it follows."""
    state = replace(state, is_active=False)
    if state.status is JobStatus.CANCELLING:
        return replace(state, status=JobStatus.CANCELLED), None
    outcomes = {node: state.outcomes.get(node, Outcome(Phase.RUN)) for node in range(policy.num_nodes)}
    if all(one.is_success for one in outcomes.values()):
        if event.lost_uploads:  # the results of the work are not where they belong, so it is repeated
            return _recover(state, "", event, policy, is_barren=True, is_external=True)
        return replace(state, status=JobStatus.SUCCEEDED, reason=""), None
    ends = own_ends(outcomes)
    own = ends.values()
    summary = "; ".join(f"node {node} {one.describe()}" for node, one in sorted(ends.items()))
    last_hung, hung = state.hung, next((one.hung for one in own if one.is_hung), "")
    state = replace(state, hung=hung)
    if hung and hung == last_hung and not event.has_advanced:
        reason = f"the training hung twice at the same place, without a newer checkpoint: {hung}"
        return replace(state, status=JobStatus.FAILED, reason=reason), None
    if any(one.diverged for one in own):  # a restart would resume in the same spike
        return replace(state, status=JobStatus.FAILED, reason=summary), None
    if state.is_noticed or any(one.is_lost for one in own):
        why = state.reason if state.is_noticed else summary
        return _recover(state, why, event, policy, is_barren=False, is_external=True)
    if any(one.is_preempted or one.is_hung or one.unfit or one.code in policy.free_codes for one in own):
        # Nothing else limits these: a job that never reports its steps must not restart forever either.
        return _recover(state, summary, event, policy, is_barren=True)
    why = f"{summary}: {event.cause.error}" if event.cause and event.cause.error else summary
    in_setup = any(one.phase is Phase.SETUP for one in own)
    failed = JobStatus.FAILED_SETUP if in_setup else JobStatus.FAILED
    state = _with_cause(state, event)
    if policy.max_same and state.num_same >= policy.max_same and state.cause is not None:
        reason = (
            f"{state.num_same} attempts in a row failed in the same way, without a newer checkpoint: "
            f"{state.cause.what} ({summary})"
        )
        return replace(state, status=failed, reason=reason), None
    if state.num_errors >= policy.max_restarts:
        num = policy.max_restarts
        spent = f"; all {num} restarts after errors are used up" if num else ""
        return replace(state, status=failed, reason=why + spent), None
    state = replace(state, num_errors=state.num_errors + 1)
    return _recover(state, why, event, policy, is_barren=event.has_advanced is not None)


def _with_cause(state: JobState, event: AttemptExited) -> JobState:
    """Return the state with the cause of an own error and its repetitions."""
    if event.has_advanced:
        return state
    same = is_same(state.cause, event.cause, at_same_step=event.has_advanced is False)
    return replace(state, cause=event.cause, num_same=state.num_same + 1 if same else 1)


def _recover(
    state: JobState,
    why: str,
    event: AttemptExited,
    policy: RestartPolicy,
    *,
    is_barren: bool,
    is_external: bool = False,
) -> tuple[JobState, float | None]:
    why = "; ".join(filter(None, (why, event.lost_uploads)))
    num_barren = num_hurried = 0
    if event.has_advanced:
        state = replace(state, cause=None, num_same=0)
    else:
        num_barren, num_hurried = state.num_barren + is_barren, state.num_hurried + 1
    state = replace(state, num_barren=num_barren, num_hurried=num_hurried, reason=why)
    if is_barren and num_barren >= MAX_BARREN:
        reason = (
            f"{why}; {num_barren} attempts in a row exited without a newer checkpoint, so "
            "the job is not restarted"
        )
        return replace(state, status=JobStatus.FAILED, reason=reason), None
    return replace(state, status=JobStatus.RECOVERING), pause_s(num_hurried, is_external)


def pause_s(num_hurried: int, is_external: bool) -> float:
    """Return the backoff before the next attempt. The first retry after a preemption does not wait."""
    num_failures = num_hurried - is_external
    return 0.0 if num_failures < 1 else backoff.doubled(num_failures, 1.0, MAX_WAIT_S)


def exit_status(state: JobState) -> int:
    """Return the exit status of a job: 0 unless it has ended without success, then that of its command.

    That is the status of the first node that failed by itself, 128 and the signal, or else 1.
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
