"""What interruptions cost: by hand, and against runs whose truth is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.run import Done
from holdfast.report import Story, tell
from report.telling import START, Fate, Telling, simulate


def story_of(told: Telling, *, finished: Done | None = None) -> Story:
    """The story of what was told."""
    return tell(told.by_time(), told.claims, finished=finished)


@pytest.fixture
def killed() -> Telling:
    """Saves at 10 s, 20 s and 30 s; killed at about 36 s; another attempt at 100 s goes on at 104 s."""
    told = Telling()
    told.claim(1, 0.0)
    for step in (10, 20, 30):
        told.save(1, step, float(step), blocked_s=0.5)
    told.claim(2, 100.0)
    told.tell(2, 104.0, "restored", 30, seconds=4.0)
    told.save(2, 40, 114.0, blocked_s=0.5)
    return told


def test_a_kill_by_hand(killed: Telling) -> None:
    (one,) = story_of(killed).interruptions
    assert (one.kind, one.before, one.after, one.is_failure) == ("stopped", 1, 2, True)
    assert (one.last_step, one.restored_step, one.steps_lost) == (30, 30, 0)
    assert (one.redo_s, one.down_s, one.restore_s) == pytest.approx((0.0, 69.5, 4.0))
    assert one.steps_lost_most == 9  # it would have saved after 10 more


def test_a_first_save_that_makes_the_claim_lies_within_its_attempt() -> None:
    told = Telling()
    told.save(1, 1, 10.0, blocked_s=0.3)
    told.claim(1, 10.2)
    told.save(1, 2, 12.0, blocked_s=0.1)
    story = story_of(told)
    assert story.times.total_s == pytest.approx(2.1)
    assert story.times.blocked_s == pytest.approx(0.4)
    assert story.overhead_share == pytest.approx(0.4 / 2.1)


def test_training_goes_again_when_the_last_rank_has_restored(killed: Telling) -> None:
    killed.tell(2, 106.0, "restored", 30, seconds=6.0, rank=1)
    (one,) = story_of(killed).interruptions
    assert one.restore_s == pytest.approx(6.0)


def test_times_by_hand(killed: Telling) -> None:
    story = story_of(killed)
    times = story.times
    assert times.total_s == pytest.approx(114.5)
    assert times.lost_s == pytest.approx(73.5)
    assert times.blocked_s == pytest.approx(2.0)
    assert times.kept_s == pytest.approx(114.5 - 73.5 - 2.0)
    assert story.overhead_share == pytest.approx(2.0 / (30.5 + 10.5))


def test_advice_by_hand(killed: Telling) -> None:
    advice = story_of(killed).advice
    assert (advice.num_failures, advice.mtbf_s) == (1, pytest.approx(41.0))
    assert (advice.cost_s, advice.interval_s, advice.step_s) == pytest.approx((0.5, 10.0, 0.95))
    assert advice.own is not None
    assert advice.own.young_s == pytest.approx((2 * 0.5 * 41) ** 0.5)
    assert advice.restart_s == pytest.approx(73.5)
    assert advice.useful_s == pytest.approx(advice.own.daly_s)


def test_going_back_to_an_older_step_is_work_to_be_done_again(killed: Telling) -> None:
    killed.events = [event for event in killed.events if event.attempt == 1]
    killed.tell(2, 104.0, "restored", 10, detail="passed over step 30 of attempt 1: rotten")
    (one,) = story_of(killed).interruptions
    assert (one.steps_lost, one.kind) == (20, "stopped")
    assert (one.redo_s, one.down_s, one.restore_s) == pytest.approx((20.0, 69.5, 4.0))


def test_the_copy_that_was_restored_counts_not_a_newer_one_of_the_same_step(killed: Telling) -> None:
    """Attempt 2 saved step 30 again; that copy is damaged, so attempt 3 falls back on attempt 1's."""
    killed.events = [event for event in killed.events if event.attempt == 1]
    killed.tell(2, 104.0, "restored", 10)
    killed.save(2, 30, 130.0)
    killed.claim(3, 140.0)
    killed.tell(3, 142.0, "restored", 30, detail="passed over step 30 of attempt 2: rotten")
    _, second = story_of(killed).interruptions
    assert second.cost_s == pytest.approx(142.0 - 104.0)


def test_the_second_failure_on_the_same_checkpoint_costs_only_what_is_new(killed: Telling) -> None:
    killed.events = [event for event in killed.events if event.step != 40]
    killed.claim(3, 200.0)
    killed.tell(3, 205.0, "restored", 30)
    first, second = story_of(killed).interruptions
    assert first.cost_s == pytest.approx(73.5)
    assert second.cost_s == pytest.approx(205.0 - 104.0)
    assert story_of(killed).times.lost_s == pytest.approx(205.0 - 30.5)


def test_starts_that_came_to_nothing_are_counted_as_failures_and_as_time_down(killed: Telling) -> None:
    del killed.claims[2]
    killed.events = [event for event in killed.events if event.attempt == 1]
    for number, at_s in ((2, 50.0), (3, 60.0), (4, 100.0)):
        killed.claim(number, at_s)
    killed.tell(4, 104.0, "restored", 30)
    story = story_of(killed)
    (one,) = story.interruptions
    assert (one.num_dead_starts, one.down_s) == (2, pytest.approx(69.5))
    assert story.advice.num_failures == 3


def test_without_a_failure_the_best_interval_is_not_known() -> None:
    told = Telling()
    told.claim(1, 0.0)
    for step in (10, 20, 30):
        told.save(1, step, float(step), blocked_s=0.5)
    advice = story_of(told).advice
    assert (advice.own, advice.mtbf_s, advice.useful_s, advice.lost_share) == (None, None, None, None)
    assert advice.mtbf_bounds_s == (pytest.approx(30.5 / 2.9957, rel=1e-3), None)
    assert [one.mtbf_s for one in advice.assumed] == [3600, 4 * 3600, 86400, 7 * 86400]


def test_a_finished_run_that_is_made_longer_was_not_interrupted(killed: Telling) -> None:
    story = story_of(killed, finished=Done("run", 1, 30, START + 31))
    (one,) = story.interruptions
    assert (one.kind, one.is_failure) == ("finished", False)
    assert story.times.idle_s == pytest.approx(69.5)
    assert story.times.lost_s == pytest.approx(4.0)
    assert story.advice.mtbf_s is None


@pytest.mark.parametrize(
    ("end", "kind", "is_failure"),
    [
        ("preempted (SIGTERM)", "preempted", False),
        ("went back to step 10", "went back", False),
        ("finished", "finished", False),
        ("closed", "closed", False),
        ("RuntimeError: NaN", "stopped", True),
    ],
)
def test_an_attempt_that_told_how_it_ended_is_believed(
    killed: Telling, end: str, kind: str, is_failure: bool
) -> None:
    killed.tell(1, 40.0, "ended", 38, detail=end)
    (one,) = story_of(killed).interruptions
    assert (one.kind, one.is_failure, one.end) == (kind, is_failure, end)
    assert (one.last_step, one.steps_lost, one.steps_lost_most) == (38, 8, 8)
    assert one.redo_s == pytest.approx(9.5)


def test_the_same_process_that_restored_an_older_step_went_back(killed: Telling) -> None:
    killed.events = [event for event in killed.events if event.attempt == 1]
    killed.claim(2, 100.0, pid=101)
    killed.tell(2, 104.0, "restored", 10)
    (one,) = story_of(killed).interruptions
    assert (one.kind, one.is_failure) == ("went back", False)


def test_a_container_s_restart_is_no_going_back(killed: Telling) -> None:
    """Every process in a container may have the id 1, and the host's name stays."""
    for number, at_s in ((1, 0.0), (2, 100.0)):
        killed.claim(number, at_s, pid=1)
    (one,) = story_of(killed).interruptions
    assert one.kind == "stopped"


def test_an_import_is_no_attempt_at_training() -> None:
    told = Telling()
    told.claim(1, 0.0)
    told.tell(1, 1.0, "committed", 7, num_bytes=10, detail="imported from model.pt")
    told.claim(2, 500.0)
    told.tell(2, 501.0, "restored", 7)
    told.save(2, 8, 510.0)
    story = story_of(told)
    assert story.interruptions == ()
    assert story.times.total_s == pytest.approx(10.0)


def test_a_home_without_history_has_an_empty_story() -> None:
    story = tell([], {})
    assert (story.times.total_s, story.interruptions, story.overhead_share) == (0.0, (), None)
    assert story.as_json()["began_unix_s"] is None


fates = st.builds(
    Fate,
    num_steps=st.integers(0, 20),
    into_step_s=st.floats(0, 0.99),
    outage_s=st.floats(0, 100),
    restore_s=st.floats(0, 10),
    num_damaged=st.integers(0, 3),
)


@given(st.lists(fates, min_size=1, max_size=8), st.integers(1, 6), st.floats(0.1, 10), st.floats(0, 0.5))
def test_time_lost_is_what_did_not_lead_to_the_end(
    drawn: list[Fate], every: int, step_s: float, blocked_s: float
) -> None:
    """The story, told from traces alone, against an account kept along the checkpoints."""
    run = simulate(drawn, every=every, step_s=step_s, blocked_s=blocked_s)
    story = story_of(run.telling)
    times = story.times
    parts = times.kept_s + times.blocked_s + times.redo_s + times.down_s + times.restore_s + times.idle_s
    assert parts == pytest.approx(times.total_s, abs=1e-3)
    trained = [life for life in story.lives if life.has_trained]
    if not trained or trained[-1].number != len(drawn):
        return  # the last attempt left no trace of training, so the end that it led to is not seen
    assert times.total_s == pytest.approx(run.total_s, abs=1e-3)
    assert times.kept_s + times.blocked_s == pytest.approx(run.useful_s, abs=1e-3)
    assert times.lost_s == pytest.approx(run.total_s - run.useful_s, abs=1e-3)
    assert sum(one.cost_s for one in story.interruptions) == pytest.approx(times.lost_s, abs=1e-3)


@given(st.lists(fates, min_size=2, max_size=8), st.integers(1, 6))
def test_steps_lost_are_between_the_bounds(drawn: list[Fate], every: int) -> None:
    run = simulate(drawn, every=every, step_s=1.0, blocked_s=0.1)
    story = story_of(run.telling)
    for one in story.interruptions:
        if one.after - one.before > 1:
            continue  # what attempts in between have done is not known
        truth = run.steps_lost[one.before - 1]
        assert one.steps_lost <= truth
        assert one.steps_lost_most is None or truth <= one.steps_lost_most


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["restored", "saved", "staged", "persisted", "committed", "drained", "retained", "failed"]
        ),
        st.integers(1, 4),
        st.floats(0, 1000),
        st.integers(0, 5),
        st.floats(0, 50),
    ),
    max_size=30,
)


@given(events, st.dictionaries(st.integers(1, 4), st.floats(0, 1000)))
def test_no_history_however_strange_is_too_much(
    told_events: list[tuple[str, int, float, int, float]], claimed: dict[int, float]
) -> None:
    """Clocks that disagree, lost lines, attempts out of order: nothing fails, nothing is negative."""
    told = Telling()
    for number, at_s in claimed.items():
        told.claim(number, at_s)
    for kind, attempt, at_s, step, seconds in told_events:
        told.tell(attempt, at_s, kind, step, seconds=seconds, num_bytes=10)
    story = story_of(told)
    times = story.times
    assert min(times.total_s, times.kept_s, times.blocked_s, times.lost_s, times.idle_s) >= 0
    assert all(one.cost_s >= 0 and one.steps_lost >= 0 for one in story.interruptions)
    assert story.as_json()["times"]["lost_s"] == times.lost_s
