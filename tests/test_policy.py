"""Policies: when a save is due, and what it costs."""

from __future__ import annotations

import datetime

import pytest

from holdfast.checkpoint.policy import EveryAuto, EverySteps, EveryTime, Moment, daly_s, every
from holdfast.checkpoint.run.cadence import Meter
from holdfast.checkpoint.run.saves import Overdue
from holdfast.errors import InvalidInput


def pace(step: int, **facts: float) -> Moment:
    values = {"now_s": 0.0, "saved_step": 0, "saved_s": 0.0, **facts}
    return Moment(step=step, **values)  # pyright: ignore[reportArgumentType]


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
    too_soon = pace(50, now_s=3.0, save_cost_s=0.001, durable_s=5.0)
    assert not EveryAuto().due(too_soon), "the save before is not durable yet"


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


@pytest.mark.parametrize(
    ("usual", "slowed_s", "blocked_s", "cost_s"), [(10, (1.25, 1.15), 0.1, 0.5), (1, (0.5,), 0.01, 0.0)]
)
def test_the_meter_counts_blocked_time_and_slowed_steps_but_no_quick_ones(
    usual: int, slowed_s: tuple[float, ...], blocked_s: float, cost_s: float
):
    meter = Meter()
    for _ in range(usual):
        meter.step(1.0, in_flight=False)
    for seconds in slowed_s:
        meter.step(seconds, in_flight=True)
    meter.saved(blocked_s=blocked_s, durable_s=2.0)
    assert (meter.save_cost_s, meter.durable_s) == (pytest.approx(cost_s), 2.0)


def overdue_at(overdue: Overdue, *moments_s: float) -> list[float]:
    """Return the moments at which a report is due."""
    return [now_s for now_s in moments_s if overdue.check(now_s) is not None]


def fail_at(overdue: Overdue, *moments_s: float) -> None:
    """Begin saves that fail at once."""
    for moment_s in moments_s:
        overdue.begin(moment_s)
        overdue.fail()


def test_three_failed_saves_in_a_row_are_reported_and_then_twice_as_many():
    overdue = Overdue(now_s=0.0)
    reported = []
    for number in range(1, 13):
        fail_at(overdue, 10.0 * number)
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


def test_a_success_ends_the_count_of_failures_and_the_doubling():
    overdue = Overdue(now_s=0.0)
    fail_at(overdue, 1.0, 2.0, 3.0)
    assert overdue.check(4.0) is not None
    overdue.begin(5.0)
    overdue.succeed(6.0)
    assert overdue.check(1e6) is None, "nothing is under way"
    for moment_s in (7.0, 8.0, 9.0):
        assert overdue.check(moment_s) is None
        fail_at(overdue, moment_s)
    assert overdue.check(10.0) == 4.0, "three are enough again; seconds since the last success"
    assert overdue.num_failed == 3


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
        return EveryAuto().due(Moment(20, after_s, 10, 0.0, 0.01, 0.1, mtbf_s))

    assert due(1.1, None)
    assert not due(1.1, 3600.0)
    assert due(daly_s(0.01, 3600.0) + 0.1, 3600.0)
