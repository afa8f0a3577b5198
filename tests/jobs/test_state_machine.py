"""The state machine of a job, in scenarios and in every sequence of events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS
from holdfast.jobs import state_machine
from holdfast.jobs.outcome import MAX_SAME, FailureCause, Outcome, Phase
from holdfast.jobs.state_machine import (
    MAX_BARREN,
    MAX_WAIT_S,
    AttemptDue,
    AttemptEvent,
    AttemptExited,
    CancelRequested,
    ControllerFailed,
    JobEvent,
    JobState,
    NodeExited,
    NodesRunning,
    NoticeDelivered,
    NoticeReceived,
    PredecessorFailed,
    RestartPolicy,
    Uploading,
    advance,
    exit_status,
    pause_s,
)
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import Timers

DONE = Outcome(Phase.RUN, code=0)
FAILED = Outcome(Phase.RUN, code=1)
PREEMPTED = Outcome(Phase.RUN, code=PREEMPTED_STATUS)
LOST = Outcome(Phase.RUN)
KILLED = Outcome(Phase.RUN, killed_by=9)
DIVERGED = Outcome(Phase.RUN, code=1, diverged="loss is 9 at step 7")
HUNG = Outcome(Phase.RUN, code=HUNG_STATUS, hung="rank 3 in train.py:88 (step)")
STOPPED = Outcome(Phase.RUN, killed_by=9, is_stopped=True)
BAD_SETUP = Outcome(Phase.SETUP, code=2)
OUT_OF_MEMORY = Outcome(Phase.RUN, code=137)
UNFIT = Outcome(Phase.SETUP, code=1, unfit="the next save does not fit")
Cause = FailureCause | None
CAUSES = [FailureCause(f"ValueError: {key}", key, exact) for key in "ab" for exact in "12"]


NOW_S = 100.0


class Scenario:
    """State of a job and what is due, changed event by event, all at one time."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self.policy = policy or RestartPolicy()
        self.job_state = JobState()
        self.due = Timers()

    def apply(self, *events: JobEvent) -> JobStatus:
        """Apply events in order."""
        for event in events:
            self.job_state, self.due = advance(self.job_state, self.due, event, self.policy, NOW_S)
        return self.job_state.status

    def begin(self, *events: JobEvent) -> JobStatus:
        """Run the first attempt up to its commands, and apply events."""
        return self.apply(AttemptDue(), NodesRunning(1), *events)

    def run(self, *outcomes: Outcome, has_advanced: bool | None = None, cause: Cause = None) -> JobStatus:
        """Run an attempt from its start, or from the backoff before it, to its end."""
        self.apply(AttemptDue())
        number = self.job_state.attempt
        ends = (NodeExited(number, node, one) for node, one in enumerate(outcomes))
        self.apply(NodesRunning(number), *ends)
        return self.apply(AttemptExited(number, has_advanced, cause=cause))


def test_a_job_that_finishes_goes_through_its_statuses() -> None:
    scenario = Scenario()
    assert scenario.job_state.status is JobStatus.PENDING
    assert scenario.apply(AttemptDue()) is JobStatus.STARTING
    assert scenario.due == Timers()
    assert scenario.apply(NodesRunning(1)) is JobStatus.RUNNING
    assert scenario.apply(NodeExited(1, 0, DONE)) is JobStatus.RUNNING
    assert scenario.due == Timers(kill_unix_s=NOW_S), "what it left behind is ended"
    assert scenario.apply(AttemptExited(1, None)) is JobStatus.SUCCEEDED
    assert scenario.job_state.recoveries == 0


def test_a_completed_job_winds_down_until_its_files_are_uploaded() -> None:
    scenario = Scenario()
    assert scenario.begin(NodeExited(1, 0, DONE), Uploading(1, "3 files")) is JobStatus.WINDING_DOWN
    assert scenario.job_state.reason == "3 files"
    assert (
        scenario.apply(NoticeReceived(30.0), NodesRunning(1), Uploading(1, "2 files"))
        is JobStatus.WINDING_DOWN
    ), "no node is left"
    assert scenario.job_state.reason == "2 files"
    assert scenario.apply(AttemptExited(1, None)) is JobStatus.SUCCEEDED
    assert scenario.job_state.reason == ""


def test_only_a_completed_job_winds_down() -> None:
    scenario = Scenario()
    assert scenario.begin(NodeExited(1, 0, PREEMPTED), Uploading(1, "3 files")) is JobStatus.RUNNING
    cancelled = Scenario()
    cancelled.begin(CancelRequested(), NodeExited(1, 0, DONE))
    assert cancelled.apply(Uploading(1, "x")) is JobStatus.CANCELLING
    assert cancelled.apply(AttemptExited(1, None)) is JobStatus.CANCELLED
    late = Scenario()
    late.begin(NodeExited(1, 0, DONE), Uploading(1, "x"), CancelRequested())
    assert late.apply(AttemptExited(1, None)) is JobStatus.CANCELLED


def test_work_whose_files_are_lost_with_their_machine_is_repeated() -> None:
    """Not without limit: a bucket may never answer."""
    scenario = Scenario()
    for number in range(1, MAX_BARREN + 1):
        scenario.apply(AttemptDue())
        scenario.apply(NodesRunning(number), NodeExited(number, 0, DONE), Uploading(number, "3 files"))
        assert scenario.job_state.status is JobStatus.WINDING_DOWN
        scenario.apply(AttemptExited(number, None, "3 files in /scratch"))
        assert scenario.job_state.reason.startswith("3 files in /scratch")
    assert scenario.job_state.status is JobStatus.FAILED
    assert "attempts in a row" in scenario.job_state.reason


def test_the_reason_of_a_restart_names_lost_files() -> None:
    scenario = Scenario(RestartPolicy(max_restarts=1))
    scenario.begin(NodeExited(1, 0, LOST))
    assert scenario.apply(AttemptExited(1, None, "3 files in /scratch")) is JobStatus.RECOVERING
    assert scenario.job_state.reason == "node 0 was lost; 3 files in /scratch"
    scenario.apply(AttemptDue(), NodesRunning(2), NodeExited(2, 0, FAILED))
    scenario.apply(AttemptExited(2, None, "4 files"))
    assert scenario.job_state.reason == "node 0 failed in run with status 1; 4 files"


MANY, ONCE = RestartPolicy(max_restarts=100), RestartPolicy(max_restarts=1)
MANY_FREE = RestartPolicy(max_restarts=5, free_codes=frozenset({1}))
CHOSEN = RestartPolicy(free_codes=frozenset({33}))
FREE = Outcome(Phase.RUN, code=33)
SPENT = "node 0 failed in run with status 1"
BARREN = "without a newer checkpoint"
SAME = "3 attempts in a row failed in the same way"


@pytest.mark.parametrize(
    ("policy", "outcome", "has_advanced", "cause", "restarts", "num_errors", "last", "reason"),
    [
        # A preemption never counts as an error, and is no crash loop without progress either.
        *((RestartPolicy(), one, True, None, 50, 0, DONE, "") for one in (LOST, KILLED, PREEMPTED)),
        (RestartPolicy(), LOST, False, None, 10 * MAX_BARREN, 0, DONE, ""),
        # Errors restart as often as allowed, and chosen exit codes without being counted.
        *((RestartPolicy(max_restarts=n), FAILED, None, None, n, n, FAILED, SPENT) for n in (0, 1, 3)),
        (CHOSEN, FREE, True, None, 20, 0, Outcome(Phase.RUN, code=34), "status 34"),
        # A job without progress is stopped. Of errors, it must be known that there is none.
        *((CHOSEN, FREE, advanced, None, MAX_BARREN - 1, 0, FREE, BARREN) for advanced in (False, None)),
        (MANY, FAILED, False, None, MAX_BARREN - 1, MAX_BARREN - 1, FAILED, BARREN),
        (MANY, FAILED, None, None, 100, 100, FAILED, "all 100 restarts after errors are used up"),
        # One cause that repeats ends the job with it, unless there is progress or no limit.
        *((MANY, FAILED, one, CAUSES[0], MAX_SAME - 1, MAX_SAME - 1, FAILED, SAME) for one in (False, None)),
        (MANY, BAD_SETUP, None, CAUSES[0], MAX_SAME - 1, MAX_SAME - 1, BAD_SETUP, SAME),
        (MANY, FAILED, True, CAUSES[0], 100, 100, FAILED, "all 100 restarts"),
        (RestartPolicy(max_restarts=9, max_same=0), FAILED, None, CAUSES[0], 9, 9, FAILED, "all 9 restarts"),
        # A failed setup has its own status.
        (RestartPolicy(), BAD_SETUP, None, None, 0, 0, BAD_SETUP, "failed in setup"),
        (ONCE, BAD_SETUP, None, None, 1, 1, DONE, ""),
        # The out-of-memory killer leaves the shell alive, which exits with 137. A lost machine does not.
        (ONCE, OUT_OF_MEMORY, True, None, 1, 1, OUT_OF_MEMORY, "killed by SIGKILL: usually out of memory"),
        # A training that diverged would diverge again.
        (MANY_FREE, DIVERGED, True, None, 0, 0, DIVERGED, "node 0 diverged: loss is 9 at step 7"),
    ],
)
def test_a_job_is_restarted_a_number_of_times(
    policy: RestartPolicy,
    outcome: Outcome,
    has_advanced: bool | None,
    cause: FailureCause | None,
    restarts: int,
    num_errors: int,
    last: Outcome,
    reason: str,
) -> None:
    scenario = Scenario(policy)
    for _ in range(restarts):
        assert scenario.run(outcome, has_advanced=has_advanced, cause=cause) is JobStatus.RECOVERING
    assert (scenario.job_state.recoveries + 1, scenario.job_state.num_errors) == (
        max(restarts, 1),
        num_errors,
    )
    failed = JobStatus.FAILED_SETUP if last is BAD_SETUP else JobStatus.FAILED
    expected = JobStatus.SUCCEEDED if last is DONE else failed
    assert scenario.run(last, has_advanced=has_advanced, cause=cause) is expected
    assert reason in scenario.job_state.reason
    assert exit_status(scenario.job_state) == (last.code if last is not DONE else 0)
    if reason == SAME and last is FAILED:
        assert "ValueError: a (node 0 failed in run with status 1)" in scenario.job_state.reason


def test_a_lost_node_counts_even_if_the_others_failed_because_of_it_first() -> None:
    scenario = Scenario(RestartPolicy(num_nodes=2))
    assert scenario.run(FAILED, LOST) is JobStatus.RECOVERING
    assert scenario.job_state.num_errors == 0


def test_a_notice_makes_any_end_a_preemption() -> None:
    """As with torchrun, which exits with 1 when it is stopped, however its workers exited."""
    scenario = Scenario()
    scenario.begin(NoticeReceived(30.0))
    until_s = NOW_S + 30.0
    assert scenario.due == Timers(until_s, "holdfast preempt", until_s, kill_keepers=True)
    assert scenario.apply(NodeExited(1, 0, FAILED), AttemptExited(1, True)) is JobStatus.RECOVERING
    assert scenario.due == Timers(wake_unix_s=NOW_S)
    assert "notice" in scenario.job_state.reason


def test_a_completed_job_succeeds_even_after_a_notice() -> None:
    scenario = Scenario()
    assert (
        scenario.begin(NoticeReceived(30.0), NodeExited(1, 0, DONE), AttemptExited(1, True))
        is JobStatus.SUCCEEDED
    )


def test_backoff_doubles_up_to_a_minute_and_is_zero_after_the_first_loss() -> None:
    assert [pause_s(n, is_external=True) for n in range(4)] == [0.0, 0.0, 1.0, 2.0]
    assert [pause_s(n, is_external=False) for n in range(4)] == [0.0, 1.0, 2.0, 4.0]
    assert pause_s(10_000, is_external=False) == MAX_WAIT_S


def test_one_failed_node_stops_the_others_after_a_moment() -> None:
    scenario = Scenario(RestartPolicy(num_nodes=3))
    scenario.begin(NodeExited(1, 1, FAILED))
    assert scenario.due.kill_unix_s is not None
    assert 0 < scenario.due.kill_unix_s - NOW_S < 30
    scenario.apply(NodeExited(1, 0, STOPPED), NodeExited(1, 2, STOPPED))
    assert scenario.apply(AttemptExited(1, None)) is JobStatus.FAILED
    assert scenario.job_state.reason == "node 1 failed in run with status 1"


def test_a_lost_node_stops_the_others_at_once() -> None:
    scenario = Scenario(RestartPolicy(num_nodes=2))
    scenario.begin(NodeExited(1, 1, LOST))
    assert scenario.due == Timers(kill_unix_s=NOW_S)


def test_cancelling_leaves_time_to_save() -> None:
    scenario = Scenario()
    assert scenario.begin(CancelRequested()) is JobStatus.CANCELLING
    until_s = NOW_S + RestartPolicy().grace_s
    due = Timers(until_s, "holdfast cancel", until_s)
    assert scenario.due == due
    assert scenario.apply(NoticeReceived(1.0), CancelRequested()) is JobStatus.CANCELLING
    assert scenario.due == due
    assert scenario.apply(NodeExited(1, 0, PREEMPTED), AttemptExited(1, True)) is JobStatus.CANCELLED


def test_cancelling_does_not_wait_for_a_job_without_handlers() -> None:
    scenario = Scenario()
    scenario.begin(CancelRequested(), NoticeDelivered(1, 1))
    assert scenario.due.kill_unix_s == NOW_S + RestartPolicy().grace_s
    scenario.apply(NoticeDelivered(1, 0))
    assert scenario.due.kill_unix_s == NOW_S
    preempted = Scenario()
    preempted.begin(NoticeReceived(30.0), NoticeDelivered(1, 0))
    assert preempted.due.kill_unix_s == NOW_S + 30.0, "a cloud gives the whole lead, whoever listens"


def test_cancelling_between_attempts_ends_the_job_at_once() -> None:
    scenario = Scenario()
    scenario.run(LOST)
    assert scenario.apply(CancelRequested()) is JobStatus.CANCELLED
    assert scenario.apply(AttemptDue()) is JobStatus.CANCELLED


def test_a_job_after_one_that_failed_never_starts() -> None:
    scenario = Scenario()
    assert scenario.apply(PredecessorFailed("job 1 is FAILED")) is JobStatus.CANCELLED
    found = (scenario.job_state.attempt, scenario.job_state.reason, scenario.due)
    assert found == (0, "job 1 is FAILED", Timers())
    scenario = Scenario()
    assert scenario.apply(AttemptDue(), PredecessorFailed("x")) is JobStatus.STARTING


def test_a_failed_controller_kills_what_is_running() -> None:
    scenario = Scenario()
    status = scenario.apply(AttemptDue(), ControllerFailed("disk on fire"))
    assert status is JobStatus.FAILED_CONTROLLER
    assert scenario.due == Timers(kill_unix_s=NOW_S)
    assert scenario.job_state.reason == "disk on fire"


@given(st.lists(st.sampled_from([LOST, KILLED, PREEMPTED]), min_size=1, max_size=30), st.data())
def test_preemptions_and_lost_nodes_never_count_as_a_repetition(ends: list[Outcome], data: st.DataObject):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_machine, "MAX_BARREN", 1000)
        scenario = Scenario(RestartPolicy(max_restarts=100))
        assert scenario.run(FAILED, has_advanced=False, cause=CAUSES[0]) is JobStatus.RECOVERING
        for one in ends:
            cause = data.draw(st.sampled_from([None, *CAUSES]))
            assert scenario.run(one, has_advanced=False, cause=cause) is JobStatus.RECOVERING
            assert scenario.job_state.num_same == 1


@given(
    st.lists(st.tuples(st.sampled_from([True, False, None]), st.sampled_from([None, *CAUSES])), max_size=40)
)
def test_only_one_cause_that_repeats_ends_a_job_early(ends: list[tuple[bool | None, FailureCause | None]]):
    """Compared with a count that is kept apart: the last MAX_SAME ends agree, and none has advanced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_machine, "MAX_BARREN", 1000)
        scenario = Scenario(RestartPolicy(max_restarts=1000))
        seen: list[tuple[bool | None, FailureCause | None]] = []
        for has_advanced, cause in ends:
            status = scenario.run(FAILED, has_advanced=has_advanced, cause=cause)
            seen = [] if has_advanced else [*seen, (has_advanced, cause)]
            last = seen[-MAX_SAME:]
            has_repeated = len(last) == MAX_SAME and all(
                before is not None
                and now is not None
                and before.key == now.key
                and (advanced is False or before.exact == now.exact)
                for (_, before), (advanced, now) in itertools.pairwise(last)
            )
            assert (status is JobStatus.FAILED) == has_repeated
            if status.is_final:
                return


def test_an_unfit_node_restarts_the_job_elsewhere_but_not_forever() -> None:
    scenario = Scenario(RestartPolicy(num_nodes=2))
    scenario.apply(AttemptDue(), NodeExited(1, 1, UNFIT))
    assert scenario.due == Timers(kill_unix_s=NOW_S)
    assert scenario.apply(NodeExited(1, 0, STOPPED), AttemptExited(1, False)) is JobStatus.RECOVERING
    assert scenario.job_state.reason == "node 1 is not fit for the job: the next save does not fit"
    assert scenario.job_state.num_errors == 0
    statuses = [scenario.run(STOPPED, UNFIT, has_advanced=False) for _ in range(MAX_BARREN - 1)]
    assert statuses[-1] is JobStatus.FAILED
    assert scenario.job_state.reason.startswith("node 1 is not fit for the job: the next save does not fit")


@pytest.mark.parametrize(
    ("second", "has_advanced", "status"),
    [
        (HUNG, False, JobStatus.FAILED),
        (HUNG, None, JobStatus.FAILED),
        (HUNG, True, JobStatus.RECOVERING),
        (replace(HUNG, hung="rank 3 elsewhere"), False, JobStatus.RECOVERING),
        (PREEMPTED, False, JobStatus.RECOVERING),
    ],
)
def test_a_hang_restarts_the_job_unless_it_is_at_the_same_place_again(
    second: Outcome, has_advanced: bool | None, status: JobStatus
) -> None:
    scenario = Scenario(RestartPolicy())
    scenario.begin(NodeExited(1, 0, HUNG))
    assert scenario.apply(AttemptExited(1, True)) is JobStatus.RECOVERING
    assert scenario.job_state.num_errors == 0
    scenario.apply(AttemptDue(), NodesRunning(2), NodeExited(2, 0, second))
    assert scenario.apply(AttemptExited(2, has_advanced)) is status
    if status is JobStatus.FAILED:
        assert scenario.job_state.reason.endswith("rank 3 in train.py:88 (step)")
        assert exit_status(scenario.job_state) == HUNG_STATUS


outcomes = st.sampled_from([DIVERGED, DONE, FAILED, PREEMPTED, LOST, KILLED, STOPPED, BAD_SETUP, HUNG, UNFIT])
progress, causes = st.sampled_from([True, False, None]), st.sampled_from([None, *CAUSES])
events = st.one_of(
    st.just(AttemptDue()),
    st.builds(NodesRunning, st.integers(1, 4)),
    st.builds(NodeExited, st.integers(1, 4), st.integers(0, 1), outcomes),
    st.builds(Uploading, st.integers(1, 4), st.just("x")),
    st.builds(AttemptExited, st.integers(1, 4), progress, cause=causes),
    st.builds(NoticeReceived, st.floats(0, 100)),
    st.builds(NoticeDelivered, st.integers(1, 4), st.integers(0, 1)),
    st.just(CancelRequested()),
    st.just(PredecessorFailed("x")),
    st.just(ControllerFailed("x")),
)
policies = st.builds(
    RestartPolicy,
    num_nodes=st.integers(1, 2),
    max_restarts=st.integers(0, 3),
    free_codes=st.sampled_from([frozenset(), frozenset({1})]),
)


@given(policies, st.lists(events, max_size=40))
def test_the_invariants_hold_in_every_sequence_of_events(allowed: RestartPolicy, happened: list[JobEvent]):
    job_state, due = JobState(), Timers()
    for event in happened:
        before, due_before = job_state, due
        job_state, due = advance(before, due, event, allowed, NOW_S)
        if before.status.is_final:
            assert (job_state, due) == (before, due_before), "the end is the end"
        if is_start := job_state.attempt != before.attempt:
            assert isinstance(event, AttemptDue)
            assert job_state.is_active
            assert not before.is_active, "never two attempts at once"
            assert due == Timers(), "nothing is left of the attempt before"
        assert job_state.attempt == before.attempt + is_start, "an attempt for each start"
        assert job_state.num_errors <= allowed.max_restarts
        assert job_state.recoveries == max(0, job_state.attempt - 1)
        if job_state.status is JobStatus.RUNNING:
            assert job_state.is_active
        if job_state.status.is_final and job_state.status is not JobStatus.FAILED_CONTROLLER:
            assert not job_state.is_active, "nothing of a job that has ended is left"
        if isinstance(event, AttemptEvent) and event.attempt != before.attempt:
            assert job_state == before, "word of another attempt changes nothing"


@given(policies, st.lists(st.tuples(outcomes, outcomes), min_size=1, max_size=60))
def test_every_job_whose_attempts_end_is_recovering_or_ended(
    allowed: RestartPolicy, ends: list[tuple[Outcome, Outcome]]
) -> None:
    scenario = Scenario(allowed)
    for pair in ends:
        status = scenario.run(*pair[: allowed.num_nodes])
        assert status.is_final or status is JobStatus.RECOVERING
        if status.is_final:
            break
        assert scenario.due == Timers(wake_unix_s=scenario.due.wake_unix_s)
        assert scenario.due.wake_unix_s is not None
    else:
        return
    attempt = scenario.job_state.attempt
    scenario.apply(AttemptDue())
    assert scenario.job_state.attempt == attempt


@given(st.integers(1, 3))
def test_applying_events_twice_changes_nothing(num_nodes: int) -> None:
    """A new controller sees again what the previous one has seen."""
    once, twice = (Scenario(RestartPolicy(num_nodes=num_nodes)) for _ in range(2))
    ends = [NodeExited(1, node, DONE) for node in range(num_nodes)]
    for event in (AttemptDue(), NodesRunning(1), *ends, AttemptExited(1, None)):
        once.apply(event)
        twice.apply(event, event)
    assert once.job_state == twice.job_state
    assert once.job_state == replace(once.job_state, status=JobStatus.SUCCEEDED)
