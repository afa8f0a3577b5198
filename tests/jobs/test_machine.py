"""The life of a job: what each event makes of it, for stories and for every sequence of events."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import PREEMPTED_STATUS
from holdfast.jobs.machine import (
    MAX_BARREN,
    MAX_WAIT_S,
    Begin,
    Broke,
    Cancel,
    Ended,
    Event,
    Gone,
    Kill,
    Life,
    Notice,
    Order,
    Pause,
    Ran,
    Start,
    Tell,
    Terms,
    Told,
    Waited,
    advance,
    pause_s,
)
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.status import Status

DONE = Outcome(Phase.RUN, code=0)
FAILED = Outcome(Phase.RUN, code=1)
PREEMPTED = Outcome(Phase.RUN, code=PREEMPTED_STATUS)
LOST = Outcome(Phase.RUN)
KILLED = Outcome(Phase.RUN, killed_by=9)
STOPPED = Outcome(Phase.RUN, killed_by=9, is_stopped=True)
BAD_SETUP = Outcome(Phase.SETUP, code=2)


class Story:
    """A life, led event by event."""

    def __init__(self, terms: Terms | None = None) -> None:
        self.terms = terms or Terms()
        self.life = Life()
        self.orders: list[Order] = []

    def tell(self, *events: Event) -> Status:
        """What has happened, in order; the orders of the last event are in `orders`."""
        for event in events:
            self.life, orders = advance(self.life, event, self.terms)
            self.orders = list(orders)
        return self.life.status

    def run(self, *outcomes: Outcome, has_advanced: bool | None = None) -> Status:
        """An attempt from its start, or from the pause before it, to its end."""
        self.tell(Begin(), Waited())
        number = self.life.attempt
        self.tell(Ran(number), *(Ended(number, node, one) for node, one in enumerate(outcomes)))
        return self.tell(Gone(number, has_advanced))


def test_a_job_that_finishes_goes_through_its_statuses() -> None:
    story = Story()
    assert story.life.status is Status.PENDING
    assert story.tell(Begin()) is Status.STARTING
    assert story.orders == [Start(1)]
    assert story.tell(Ran(1)) is Status.RUNNING
    assert story.tell(Ended(1, 0, DONE)) is Status.RUNNING
    assert story.orders == [Kill(0.0)], "what it left behind is ended"
    assert story.tell(Gone(1, None)) is Status.SUCCEEDED
    assert story.life.recoveries == 0


@pytest.mark.parametrize("outcome", [LOST, KILLED, PREEMPTED])
def test_what_was_taken_away_never_counts_as_an_error(outcome: Outcome) -> None:
    story = Story()
    for _ in range(50):
        assert story.run(outcome, has_advanced=True) is Status.RECOVERING
    assert story.life.num_errors == 0
    assert story.run(DONE) is Status.SUCCEEDED
    assert story.life.recoveries == 50


def test_a_lost_node_is_what_counts_even_if_the_others_failed_of_it_first() -> None:
    story = Story(Terms(num_nodes=2))
    assert story.run(FAILED, LOST) is Status.RECOVERING
    assert story.life.num_errors == 0


def test_a_notice_makes_any_end_a_preemption() -> None:
    """As torchrun, which ends with 1 when it is told to stop, whatever its workers ended with."""
    story = Story()
    story.tell(Begin(), Ran(1), Notice(30.0))
    assert story.orders == [Tell(30.0, "holdfast preempt"), Kill(30.0, with_keepers=True)]
    assert story.tell(Ended(1, 0, FAILED), Gone(1, True)) is Status.RECOVERING
    assert story.orders == [Pause(0.0)]
    assert "notice" in story.life.reason


def test_done_is_done_also_after_a_notice() -> None:
    story = Story()
    assert story.tell(Begin(), Ran(1), Notice(30.0), Ended(1, 0, DONE), Gone(1, True)) is Status.SUCCEEDED


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_errors_restart_as_often_as_is_allowed(max_restarts: int) -> None:
    story = Story(Terms(max_restarts=max_restarts))
    for _ in range(max_restarts):
        assert story.run(FAILED) is Status.RECOVERING
    assert story.run(FAILED) is Status.FAILED
    assert "node 0 failed in run with status 1" in story.life.reason


def test_a_trainer_killed_alone_counts_as_an_error_and_is_told_as_what_it_usually_is() -> None:
    """The out-of-memory killer leaves the shell alive, which says 137; a machine that goes takes it along."""
    story = Story(Terms(max_restarts=1))
    killed = Outcome(Phase.RUN, code=137)
    assert story.run(killed, has_advanced=True) is Status.RECOVERING
    assert story.life.num_errors == 1
    assert "killed by SIGKILL: usually it ran out of memory" in story.life.reason
    assert story.run(killed, has_advanced=True) is Status.FAILED


def test_setup_that_fails_is_told_as_such() -> None:
    assert Story().run(BAD_SETUP) is Status.FAILED_SETUP
    story = Story(Terms(max_restarts=1))
    assert story.run(BAD_SETUP) is Status.RECOVERING
    assert story.run(DONE) is Status.SUCCEEDED


def test_chosen_exit_codes_restart_free() -> None:
    story = Story(Terms(free_codes=frozenset({33})))
    for _ in range(20):
        assert story.run(Outcome(Phase.RUN, code=33), has_advanced=True) is Status.RECOVERING
    assert story.life.num_errors == 0
    assert story.run(Outcome(Phase.RUN, code=34), has_advanced=True) is Status.FAILED


@pytest.mark.parametrize("has_advanced", [False, None])
def test_a_job_that_comes_no_further_is_stopped(has_advanced: bool | None) -> None:
    story = Story(Terms(free_codes=frozenset({33})))
    for _ in range(MAX_BARREN - 1):
        assert story.run(Outcome(Phase.RUN, code=33), has_advanced=has_advanced) is Status.RECOVERING
    assert story.run(Outcome(Phase.RUN, code=33), has_advanced=has_advanced) is Status.FAILED
    assert "no newer checkpoint" in story.life.reason


def test_restarts_after_errors_are_stopped_too_if_checkpoints_do_not_advance() -> None:
    story = Story(Terms(max_restarts=100))
    statuses = [story.run(FAILED, has_advanced=False) for _ in range(MAX_BARREN)]
    assert statuses[-1] is Status.FAILED
    unknown = Story(Terms(max_restarts=100))
    assert {unknown.run(FAILED, has_advanced=None) for _ in range(100)} == {Status.RECOVERING}


def test_preemptions_without_progress_are_no_crash_loop() -> None:
    story = Story()
    for _ in range(10 * MAX_BARREN):
        assert story.run(LOST, has_advanced=False) is Status.RECOVERING


def test_pauses_double_up_to_a_minute_and_the_first_loss_costs_none() -> None:
    assert [pause_s(n, is_external=True) for n in range(4)] == [0.0, 0.0, 1.0, 2.0]
    assert [pause_s(n, is_external=False) for n in range(4)] == [0.0, 1.0, 2.0, 4.0]
    assert pause_s(10_000, is_external=False) == MAX_WAIT_S


def test_one_failed_node_ends_the_others_after_a_moment() -> None:
    story = Story(Terms(num_nodes=3))
    story.tell(Begin(), Ran(1), Ended(1, 1, FAILED))
    (kill,) = story.orders
    assert isinstance(kill, Kill)
    assert 0 < kill.after_s < 30
    story.tell(Ended(1, 0, STOPPED), Ended(1, 2, STOPPED))
    assert story.tell(Gone(1, None)) is Status.FAILED
    assert story.life.reason == "node 1 failed in run with status 1"


def test_a_lost_node_ends_the_others_at_once() -> None:
    story = Story(Terms(num_nodes=2))
    story.tell(Begin(), Ran(1), Ended(1, 1, LOST))
    assert story.orders == [Kill(0.0)]


def test_cancelling_gives_time_to_save() -> None:
    story = Story()
    assert story.tell(Begin(), Ran(1), Cancel()) is Status.CANCELLING
    assert [type(order) for order in story.orders] == [Tell, Kill]
    assert story.tell(Notice(1.0), Cancel()) is Status.CANCELLING
    assert story.orders == []
    assert story.tell(Ended(1, 0, PREEMPTED), Gone(1, True)) is Status.CANCELLED


def test_cancelling_waits_for_nobody_if_nobody_listens() -> None:
    story = Story()
    story.tell(Begin(), Ran(1), Cancel(), Told(1, 1))
    assert story.orders == []
    story.tell(Told(1, 0))
    assert story.orders == [Kill(0.0)]
    preempted = Story()
    preempted.tell(Begin(), Ran(1), Notice(30.0), Told(1, 0))
    assert preempted.orders == [], "a cloud gives the whole lead, whoever listens"


def test_between_attempts_cancelling_is_done_at_once() -> None:
    story = Story()
    story.run(LOST)
    assert story.tell(Cancel()) is Status.CANCELLED
    assert story.tell(Waited()) is Status.CANCELLED


def test_a_broken_controller_ends_what_runs() -> None:
    story = Story()
    assert story.tell(Begin(), Broke("disk on fire")) is Status.FAILED_CONTROLLER
    assert story.orders == [Kill(0.0)]
    assert story.life.reason == "disk on fire"


# -- every sequence --------------------------------------------------------------------------------------

outcomes = st.sampled_from([DONE, FAILED, PREEMPTED, LOST, KILLED, STOPPED, BAD_SETUP])
events = st.one_of(
    st.just(Begin()),
    st.builds(Ran, st.integers(1, 4)),
    st.builds(Ended, st.integers(1, 4), st.integers(0, 1), outcomes),
    st.builds(Gone, st.integers(1, 4), st.sampled_from([True, False, None])),
    st.builds(Notice, st.floats(0, 100)),
    st.builds(Told, st.integers(1, 4), st.integers(0, 1)),
    st.just(Cancel()),
    st.just(Waited()),
    st.just(Broke("x")),
)
terms = st.builds(
    Terms,
    num_nodes=st.integers(1, 2),
    max_restarts=st.integers(0, 3),
    free_codes=st.sampled_from([frozenset(), frozenset({1})]),
)


@given(terms, st.lists(events, max_size=40))
def test_whatever_happens_the_promises_hold(allowed: Terms, happened: list[Event]) -> None:
    life = Life()
    for event in happened:
        before = life
        life, orders = advance(before, event, allowed)
        starts = [order for order in orders if isinstance(order, Start)]
        if before.status.is_final:
            assert (life, orders) == (before, ()), "the end is the end"
        assert life.attempt == before.attempt + len(starts), "an attempt for each start"
        if starts:
            assert not before.is_active, "never two attempts at once"
            assert starts[0].attempt == life.attempt
        assert life.num_errors <= allowed.max_restarts
        assert life.recoveries == max(0, life.attempt - 1)
        if life.status is Status.RUNNING:
            assert life.is_active
        if life.status.is_final and life.status is not Status.FAILED_CONTROLLER:
            assert not life.is_active, "nothing of a job that has ended is left"
        if isinstance(event, (Ran, Ended, Gone)) and event.attempt != before.attempt:
            assert life == before, "word of another attempt changes nothing"


@given(terms, st.lists(st.tuples(outcomes, outcomes), min_size=1, max_size=60))
def test_every_job_whose_attempts_end_is_recovering_or_ended(
    allowed: Terms, ends: list[tuple[Outcome, Outcome]]
) -> None:
    story = Story(allowed)
    for pair in ends:
        status = story.run(*pair[: allowed.num_nodes])
        assert status.is_final or status is Status.RECOVERING
        if status.is_final:
            break
        assert [type(order) for order in story.orders] == [Pause]
    else:
        return
    attempt = story.life.attempt
    story.tell(Begin(), Waited())
    assert story.life.attempt == attempt


@given(st.integers(1, 3))
def test_the_same_events_twice_are_as_good_as_once(num_nodes: int) -> None:
    """A controller that takes over sees again what the one before has seen."""
    once, twice = Story(Terms(num_nodes=num_nodes)), Story(Terms(num_nodes=num_nodes))
    ends = [Ended(1, node, DONE) for node in range(num_nodes)]
    for event in (Begin(), Ran(1), *ends, Gone(1, None)):
        once.tell(event)
        twice.tell(event, event)
    assert once.life == twice.life
    assert once.life == dataclasses.replace(once.life, status=Status.SUCCEEDED)
