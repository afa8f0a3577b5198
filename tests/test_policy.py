"""Policies: when a save is due, which checkpoints stay, what a save costs."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.policy import (
    EveryAuto,
    EverySteps,
    EveryTime,
    Keep,
    Meter,
    Overdue,
    Pace,
    best_first,
    every,
    line_of,
)
from holdfast.save_interval import daly_s


def pace(step: int, **facts: float) -> Pace:
    values = {"now_s": 0.0, "saved_step": 0, "saved_s": 0.0, **facts}
    return Pace(step=step, **values)  # pyright: ignore[reportArgumentType]


def test_steps_are_due_at_multiples_and_never_twice():
    policy = EverySteps(100)
    assert [step for step in range(1, 401) if policy.due(pace(step))] == [100, 200, 300, 400]
    assert not policy.due(pace(200, saved_step=200))


def test_time_is_due_by_the_clock_since_the_last_save():
    policy = EveryTime(600)
    assert not policy.due(pace(7, now_s=599.0))
    assert policy.due(pace(7, now_s=600.0))
    assert not policy.due(pace(7, now_s=5000.0, saved_step=7))


def test_auto_first_measures_then_keeps_the_cost_under_its_budget():
    policy = EveryAuto(budget=0.01, first_steps=10)
    assert not policy.due(pace(9))
    assert policy.due(pace(10))
    assert not policy.due(pace(50, now_s=19.9, save_cost_s=0.2))
    assert policy.due(pace(50, now_s=20.0, save_cost_s=0.2))


def test_auto_never_saves_faster_than_saves_become_durable():
    assert not EveryAuto().due(pace(50, now_s=3.0, save_cost_s=0.001, durable_s=5.0))


def test_policies_compose():
    policy = EverySteps(100) | EveryTime(60)
    assert policy.timed
    assert policy.due(pace(100, now_s=1.0))
    assert policy.due(pace(7, now_s=61.0))
    assert not policy.due(pace(7, now_s=1.0))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (500, EverySteps(500)),
        ("10m", EveryTime(600.0)),
        ("1.5h", EveryTime(5400.0)),
        (datetime.timedelta(seconds=90), EveryTime(90.0)),
        ("auto", EveryAuto()),
        (EverySteps(3), EverySteps(3)),
    ],
)
def test_every_accepts_steps_durations_and_auto(value: object, expected: object):
    assert every(value) == expected  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [0, -5, True, "soon", None, 1.5, "0s"])
def test_every_refuses_other_values(value: object):
    with pytest.raises(InvalidInput, match="every must be"):
        every(value)  # pyright: ignore[reportArgumentType]


def test_keep_refuses_to_keep_nothing():
    with pytest.raises(InvalidInput, match="at least 1"):
        Keep(0)


ids = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 50)), unique=True, min_size=1)


@given(ids, st.integers(1, 5), st.none() | st.integers(1, 10))
def test_keep_always_keeps_the_newest_and_what_it_promises(
    found: list[tuple[int, int]], last: int, keep_every: int | None
):
    line = sorted(found, reverse=True)
    kept = Keep(last, keep_every).kept(line)
    assert line[0] in kept
    assert set(line[:last]) <= kept
    assert all(item in line[:last] or (keep_every and item[1] % keep_every == 0) for item in kept)


@given(
    ids,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["min", "max"]),
    st.lists(st.floats() | st.none(), min_size=30, max_size=30),
)
def test_keep_keeps_the_best_and_the_newest_and_nothing_else(
    found: list[tuple[int, int]], last: int, best: int, mode: str, drawn: list[float | None]
):
    line = sorted(found, reverse=True)
    values = {one: value for one, value in zip(line, drawn, strict=False) if value is not None}
    kept = Keep(last, best=best, metric="loss", mode=mode).kept(line, values)
    finite = sorted(value for value in values.values() if math.isfinite(value))
    bound = (finite if mode == "min" else finite[::-1])[:best]
    chosen = kept - set(line[:last])
    assert set(line[:last]) <= kept
    assert all(values[one] in bound for one in chosen)
    assert len(chosen) <= best
    assert all(any(values.get(one) == value for one in kept) for value in bound)


def test_of_equal_values_the_newer_checkpoint_is_better():
    line = [(2, 40), (1, 30), (1, 20), (1, 10)]
    values = {(1, 10): 1.0, (1, 20): 1.0, (1, 30): 2.0}
    assert best_first(line, values, "min") == [(1, 20), (1, 10), (1, 30)]
    assert best_first(line, values, "max") == [(1, 30), (1, 20), (1, 10)]


@pytest.mark.parametrize(
    "options", [{"best": 1}, {"best": 0, "metric": "loss"}, {"best": 1, "metric": "loss", "mode": "least"}]
)
def test_a_policy_of_the_best_that_makes_no_sense_is_refused(options: dict[str, Any]):
    with pytest.raises(InvalidInput):
        Keep(**options)


def test_keep_none_keeps_everything():
    line = [(1, step) for step in range(9, 0, -1)]
    assert Keep(None).kept(line) == set(line)


def test_what_a_newer_attempt_left_behind_is_superseded():
    """Attempt 1 reached 500; attempt 2 began from 400 (500 was damaged) and committed 450."""
    line = line_of([(1, 300), (1, 400), (1, 500), (2, 450)], (2, 450), [(1, 400)])
    assert line.current == ((2, 450), (1, 400), (1, 300))
    assert line.superseded == ((1, 500),)


def test_an_attempt_that_committed_nothing_supersedes_nothing():
    line = line_of([(1, 400), (1, 500)], (1, 500), [])
    assert line.current == ((1, 500), (1, 400))
    assert line.superseded == ()


def test_a_fresh_start_supersedes_all_that_was_there():
    line = line_of([(1, 400), (2, 10)], (2, 10), [])
    assert line.current == ((2, 10),)
    assert line.superseded == ((1, 400),)


TWICE_BACK = [(1, 100), (1, 200), (1, 300), (2, 250), (2, 350), (3, 220)]


def test_going_back_twice_hides_what_both_left_behind():
    line = line_of(TWICE_BACK, (3, 220), [(1, 100)])
    assert line.current == ((3, 220), (1, 100))
    assert set(line.superseded) == {(1, 200), (1, 300), (2, 250), (2, 350)}


def test_resuming_twice_keeps_the_checkpoint_of_each_resume():
    """Attempt 2 resumed from 200 of attempt 1, attempt 3 from 250 of attempt 2."""
    line = line_of([*TWICE_BACK[:-1], (3, 260)], (3, 260), [(1, 200), (2, 250)])
    assert line.current == ((3, 260), (2, 250), (1, 200), (1, 100))
    assert set(line.superseded) == {(2, 350), (1, 300)}


def test_going_back_by_hand_to_a_superseded_checkpoint_makes_its_line_current():
    """Attempt 4 restored 350 of attempt 2, which attempt 3 had left behind."""
    line = line_of([*TWICE_BACK, (4, 360)], (4, 360), [(1, 200), (2, 350)])
    assert line.current == ((4, 360), (2, 350), (2, 250), (1, 200), (1, 100))
    assert set(line.superseded) == {(3, 220), (1, 300)}


def test_going_back_within_an_attempt_hides_what_it_saved_in_between():
    line = line_of([(1, 100), (1, 200), (2, 150), (2, 300), (2, 160)], (2, 160), [(1, 100), (2, 150)])
    assert line.current == ((2, 160), (2, 150), (1, 100))
    assert set(line.superseded) == {(2, 300), (1, 200)}


@given(ids, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 50)), max_size=4).map(sorted))
def test_every_checkpoint_is_current_or_superseded_by_where_the_line_left_its_attempt(
    found: list[tuple[int, int]], ancestors: list[tuple[int, int]]
):
    """Both newest first; current is what lies at or before the last step that the line has of its attempt."""
    newest = max(found)
    older = [one for one in ancestors if one[0] < newest[0]]
    line = line_of(found, newest, older)
    assert sorted(line.current + line.superseded) == sorted(found)
    assert list(line.current) == sorted(line.current, reverse=True)
    assert list(line.superseded) == sorted(line.superseded, reverse=True)
    assert line.current[0] == newest
    for attempt, step in found:
        left_at = [s for a, s in [*older, newest] if a == attempt]
        assert ((attempt, step) in line.current) == bool(left_at and step <= left_at[-1])


def test_the_meter_counts_blocked_time_and_slowed_steps():
    meter = Meter()
    for _ in range(10):
        meter.step(1.0, in_flight=False)
    meter.step(1.25, in_flight=True)
    meter.step(1.15, in_flight=True)
    meter.saved(blocked_s=0.1, durable_s=2.0)
    assert meter.save_cost_s == pytest.approx(0.5)
    assert meter.durable_s == 2.0


def test_a_step_that_happens_to_be_quick_costs_nothing():
    meter = Meter()
    meter.step(1.0, in_flight=False)
    meter.step(0.5, in_flight=True)
    meter.saved(blocked_s=0.01, durable_s=1.0)
    assert meter.save_cost_s == 0.0


def overdue_at(overdue: Overdue, *moments_s: float) -> list[float]:
    """Return the moments at which a report is due."""
    return [now_s for now_s in moments_s if overdue.check(now_s) is not None]


def test_three_failed_saves_in_a_row_are_reported_and_then_twice_as_many():
    overdue = Overdue(now_s=0.0)
    reported = []
    for number in range(1, 13):
        overdue.begin(10.0 * number)
        overdue.fail()
        if overdue.check(10.0 * number + 1.0) is not None:
            reported.append(number)
    assert reported == [3, 6, 12]


def test_a_save_that_takes_longer_than_three_intervals_is_reported_and_then_at_twice_the_time():
    overdue = Overdue(now_s=0.0)
    overdue.begin(100.0)
    overdue.succeed(101.0)
    overdue.begin(200.0)  # 100 s after the one before
    assert overdue_at(overdue, 499.0, 501.0, 799.0, 801.0, 1399.0, 1401.0) == [501.0, 801.0, 1401.0]


def test_saves_that_follow_each_other_quickly_have_a_minute():
    overdue = Overdue(now_s=0.0)
    overdue.begin(1.0)
    overdue.begin(2.0)  # the first has not succeeded: it counts
    assert overdue_at(overdue, 10.0, 60.0, 62.0) == [62.0]


def test_the_report_names_the_time_since_the_last_success():
    overdue = Overdue(now_s=0.0)
    overdue.begin(5.0)
    overdue.succeed(7.0)
    for moment_s in (20.0, 30.0, 40.0):
        overdue.begin(moment_s)
        overdue.fail()
    assert overdue.check(47.0) == 40.0
    assert overdue.num_failed == 3


def test_a_success_ends_the_count_of_failures_and_the_doubling():
    overdue = Overdue(now_s=0.0)
    for moment_s in (1.0, 2.0, 3.0):
        overdue.begin(moment_s)
        overdue.fail()
    assert overdue.check(4.0) is not None
    overdue.begin(5.0)
    overdue.succeed(6.0)
    assert overdue.check(1e6) is None, "nothing is under way"
    for moment_s in (7.0, 8.0, 9.0):
        assert overdue.check(moment_s) is None
        overdue.begin(moment_s)
        overdue.fail()
    assert overdue.check(10.0) is not None, "three are enough again"


def test_auto_uses_daly_s_interval_for_the_run_s_own_failures_within_the_budget() -> None:
    auto = EveryAuto()
    without = auto.choose(0.01, 0.1, None)
    assert (without.interval_s, "budget" in without.reason) == (pytest.approx(1.0), True)
    rare = auto.choose(0.01, 0.1, 3600.0)
    assert rare.interval_s == pytest.approx(daly_s(0.01, 3600.0))
    assert rare.interval_s > without.interval_s
    assert "Daly" in rare.reason
    often = auto.choose(5.0, 0.1, 600.0)
    assert (often.interval_s, "budget" in often.reason) == (pytest.approx(500.0), True)
    slow = auto.choose(0.01, 1000.0, 3600.0)
    assert (slow.interval_s, "durable" in slow.reason) == (1000.0, True)


def test_auto_is_due_after_the_interval_for_the_run_s_own_failures() -> None:
    def due(after_s: float, mtbf_s: float | None) -> bool:
        return EveryAuto().due(Pace(20, after_s, 10, 0.0, 0.01, 0.1, mtbf_s))

    assert due(1.1, None)
    assert not due(1.1, 3600.0)
    assert due(daly_s(0.01, 3600.0) + 0.1, 3600.0)
