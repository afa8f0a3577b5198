"""Curves from metrics have exactly one value per step that counts, despite interruptions."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.watch.report.curves import Curve, Point, collect_curves
from holdfast.watch.report.saves import HistoryEvent, parse_events


def metrics_event(
    attempt: int, at_s: float, steps: list[int], values: list[object], name: str = "loss"
) -> HistoryEvent:
    """Return an event with values of one metric."""
    line = {"t": at_s, "event": "metrics", "attempt": attempt, "steps": steps, "values": {name: values}}
    (event,) = parse_events([line])
    return event


def restored(attempt: int, at_s: float, step: int, source: int | None) -> HistoryEvent:
    """Return the event of a restore by rank 0."""
    detail = "" if source is None else f"attempt {source}"
    return HistoryEvent(at_s, "restored", step, attempt, detail=detail)


def value_of(attempt: int, step: int) -> float:
    """Return the value of an attempt and step: all differ."""
    return attempt * 1000.0 + step


attempts = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps that it makes
        st.integers(0, 11),  # how far back the next one goes on from: the number of saves it passes over
        st.booleans(),  # its restores say whose checkpoint they took
        st.integers(1, 5),  # steps in a batch
        st.booleans(),  # its last batch is lost with it, but for what a save needed
    ),
    min_size=1,
    max_size=8,
)


@given(attempts, st.integers(1, 4))
def test_each_step_that_counts_has_exactly_one_value(
    fates: list[tuple[int, int, bool, int, bool]], every: int
) -> None:
    """Compare with a simulation that records the attempt of each step."""
    events: list[HistoryEvent] = []
    saved: dict[CheckpointId, list[int]] = {}  # who made each step up to it
    line: list[int] = []
    at_s = 0.0
    for attempt, (num_steps, num_passed, says_whose, batch, loses) in enumerate(fates, start=1):
        order = sorted(saved, reverse=True)[num_passed:] or sorted(saved)[:1]
        line = []
        if order:
            source, step = order[0]
            line = list(saved[order[0]])
            at_s += 1
            newest = max(one for one, of in saved if of == step)
            has_source = says_whose or source != newest
            events.append(restored(attempt, at_s, step, source if has_source else None))
        waiting: list[int] = []
        for i in range(num_steps):
            line.append(attempt)
            waiting.append(len(line))
            is_due = len(line) % every == 0
            if is_due or len(waiting) >= batch or (i == num_steps - 1 and not loses):
                at_s += 1
                events.append(
                    metrics_event(attempt, at_s, waiting, [value_of(attempt, step) for step in waiting])
                )
                waiting = []
            if is_due:
                saved[CheckpointId(attempt=attempt, step=len(line))] = list(line)
        line = line[: len(line) - len(waiting)]
    found = collect_curves(events, saved)
    made = dict(enumerate(line, start=1))
    counted = found[0].counted if found else ()
    newest_recorded = max((event.attempt for event in events), default=0)
    if newest_recorded == len(fates):  # otherwise the last attempt has left no events
        assert [point.step for point in counted] == sorted(made)
        assert [point.attempt for point in counted] == [made[step] for step in sorted(made)]
    assert all(point.value == value_of(point.attempt, point.step) for point in counted)
    for curve in found:
        beside = [point for stretch in curve.lost for point in stretch]
        assert not set(beside) & set(curve.counted)


def test_values_that_are_recorded_twice_count_once() -> None:
    """A keeper's successor receives values again that the dead one may have written."""
    events = [
        metrics_event(1, 1.0, [1, 2], [0.5, 0.4]),
        metrics_event(1, 2.0, [1, 2], [0.5, 0.4]),
        metrics_event(1, 3.0, [2], [0.3]),
    ]
    assert collect_curves(events) == [Curve("loss", (Point(1, 1, 0.5), Point(2, 1, 0.3)), ())]


def test_going_back_within_an_attempt_discards_values() -> None:
    events = [
        restored(2, 1.0, 10, 1),
        metrics_event(2, 2.0, [11, 12], [1.0, 2.0]),
        restored(2, 3.0, 5, 1),
        metrics_event(2, 4.0, [6], [3.0]),
    ]
    (curve,) = collect_curves(events)
    assert curve.counted == (Point(6, 2, 3.0),)
    assert curve.lost == ((Point(11, 2, 1.0), Point(12, 2, 2.0)),)


def test_values_of_a_wrong_type_are_skipped() -> None:
    events = [
        metrics_event(1, 1.0, [1, 2, 3, 4, 5, 6], [1.0, None, "nan", "many", True, 10**400]),
        metrics_event(1, 2.0, [-1, 7], [1.0, "inf"]),
        *parse_events([{"t": 3.0, "event": "metrics", "attempt": 1, "steps": 5, "values": []}]),
        *parse_events([{"t": 3.0, "event": "metrics", "attempt": 1, "steps": [8], "values": {"loss": 3}}]),
    ]
    (curve,) = collect_curves(events)
    assert [point.step for point in curve.counted] == [1, 3, 7]
    assert math.isnan(curve.counted[1].value)
    assert curve.counted[2].value == math.inf


def test_restores_of_other_ranks_change_nothing() -> None:
    events = [
        metrics_event(1, 0.0, [1, 2], [1.0, 2.0]),
        restored(2, 1.0, 2, 1),
        metrics_event(2, 2.0, [3], [3.0]),
        HistoryEvent(3.0, "restored", 2, 2, rank=1, detail="attempt 1"),
    ]
    (curve,) = collect_curves(events)
    assert [point.value for point in curve.counted] == [1.0, 2.0, 3.0]
    assert curve.lost == ()


def test_values_of_steps_before_the_restored_one_do_not_count() -> None:
    events = [
        metrics_event(1, 0.0, [1, 2], [1.0, 2.0]),
        restored(2, 1.0, 2, 1),
        metrics_event(2, 2.0, [1, 2, 3], [10.0, 20.0, 30.0]),
    ]
    (curve,) = collect_curves(events)
    assert [(point.step, point.attempt) for point in curve.counted] == [(1, 1), (2, 1), (3, 2)]


def test_the_last_stretch_of_an_attempt_that_went_back_is_the_source() -> None:
    events = [
        metrics_event(1, 0.0, [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0]),
        restored(2, 1.0, 3, 1),
        metrics_event(2, 2.0, [4, 5], [40.0, 50.0]),
        restored(2, 3.0, 4, 1),
        metrics_event(2, 4.0, [5, 6], [5.0, 6.0]),
        restored(3, 5.0, 6, 2),
    ]
    (curve,) = collect_curves(events)
    assert [point.value for point in curve.counted] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [[point.value for point in stretch] for stretch in curve.lost] == [[40.0, 50.0]]
