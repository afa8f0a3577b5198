"""Saves and curves of a run follow from its events, despite interruptions."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.watch.report.curves import Curve, Point, collect_curves
from holdfast.watch.report.saves import HistoryEvent, SaveRecord, collect_saves, parse_events
from report.made_up_run import START, MadeUpRun


def only(events: list[HistoryEvent]) -> SaveRecord:
    """Return the only save in the events."""
    (save,) = collect_saves(events)
    return save


def test_a_save_of_two_ranks_is_as_large_as_both_and_as_slow_as_the_slowest() -> None:
    made_up = MadeUpRun()
    for rank, more in ((0, 0.0), (1, 0.5)):
        made_up.add(1, 10.2 + more, "saved", 5, seconds=0.2 + more, rank=rank, num_bytes=100)
        made_up.add(1, 11.0 + more, "staged", 5, seconds=1.0 + more, rank=rank, num_bytes=100)
        made_up.add(1, 13.0 + more, "persisted", 5, seconds=2.0 + more, rank=rank, num_bytes=100)
    made_up.add(1, 14.0, "committed", 5, seconds=4.0, rank=0, num_bytes=100)
    made_up.add(1, 14.3, "committed", 5, seconds=4.0, rank=1, num_bytes=100)
    save = only(made_up.by_time())
    assert (save.num_ranks, save.num_bytes, save.started_unix_s) == (2, 200, START + 10.0)
    assert (save.blocked_s, save.staged_s, save.outcome) == (0.7, 1.5, "durable")
    (copy,) = save.copies
    assert (copy.tier, copy.write_s, copy.durable_unix_s, copy.durable_s) == ("home", 2.5, START + 14.0, 4.0)
    assert copy.bytes_per_s == 80


def test_each_tier_has_its_own_times() -> None:
    made_up = MadeUpRun().save(1, 5, 10.0, durable_after_s=2.0, tier="local")
    made_up.add(1, 40.0, "drained", 5, seconds=8.0, num_bytes=1000)
    local, home = only(made_up.by_time()).copies
    assert (local.tier, local.durable_s, local.write_s, local.was_drained) == ("local", 2.0, 2.0, False)
    assert (home.tier, home.durable_s, home.write_s, home.was_drained) == ("home", 30.0, 8.0, True)
    assert only(made_up.by_time()).durable == home


def test_a_drain_by_a_later_attempt_belongs_to_the_drained_checkpoint() -> None:
    made_up = MadeUpRun().save(1, 5, 10.0, tier="local")
    made_up.save(1, 6, 12.0, tier="local")
    made_up.add(2, 40.0, "drained", 6, num_bytes=1000)
    assert [len(save.copies) for save in collect_saves(made_up.by_time())] == [1, 2]


def test_a_drain_that_names_an_attempt_belongs_to_its_checkpoint() -> None:
    made_up = MadeUpRun()
    for attempt in (1, 2):
        made_up.save(attempt, 5, 10.0 * attempt, tier="local")
    made_up.add(3, 40.0, "drained", 5, detail="attempt 1")
    assert [len(save.copies) for save in collect_saves(made_up.by_time())] == [2, 1]


def test_a_commit_by_the_next_attempt_belongs_to_the_interrupted_save() -> None:
    made_up = MadeUpRun().save(1, 5, 10.0, durable_after_s=None)
    made_up.add(2, 40.0, "committed", 5, detail="attempt 1, which fell before it could write the manifest")
    save = only(made_up.by_time())
    assert (save.attempt, save.outcome) == (1, "durable")


def test_a_failed_save_has_its_reason() -> None:
    made_up = MadeUpRun().save(1, 5, 10.0, durable_after_s=None)
    made_up.add(1, 12.0, "failed", 5, detail="disk full")
    save = only(made_up.by_time())
    assert (save.outcome, save.detail, save.durable) == ("failed", "disk full", None)


def test_a_save_without_a_recorded_end_is_unfinished() -> None:
    made_up = MadeUpRun().save(1, 5, 10.0, durable_after_s=None)
    assert only(made_up.by_time()).outcome == "unfinished"


def test_a_killed_keeper_may_leave_only_a_persisted_event() -> None:
    made_up = MadeUpRun().add(1, 13.0, "persisted", 5, seconds=2.0, num_bytes=100)
    made_up.add(1, 14.0, "committed", 5, num_bytes=100)
    save = only(made_up.by_time())
    assert (save.started_unix_s, save.blocked_s, save.num_bytes) == (START + 11.0, None, 100)


def test_a_commit_with_the_bytes_of_all_ranks_does_not_count_them_twice() -> None:
    made_up = MadeUpRun()
    for rank in (0, 1):
        made_up.add(1, 13.0, "persisted", 5, seconds=2.0, rank=rank, num_bytes=100)
    made_up.add(1, 14.0, "committed", 5, num_bytes=200)
    assert only(made_up.by_time()).num_bytes == 200


def test_deletions_and_restores_are_not_saves() -> None:
    made_up = MadeUpRun().add(2, 1.0, "restored", 5)
    made_up.add(2, 2.0, "retained", 4, detail="attempt 1, complete")
    made_up.add(2, 2.0, "drain-failed", 4, detail="503")
    assert collect_saves(made_up.by_time()) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("step", "attempt", "rank", "tier", "bytes", "seconds", "detail")


def test_a_line_is_parsed_into_an_event() -> None:
    line = {"t": 2.5, "event": "drained", "step": 7, "attempt": 3, "rank": 1, "tier": "home"}
    made_up = HistoryEvent(2.5, "drained", 7, 3, 1, "home", 10, 0.5, "so")
    assert parse_events([{**line, "bytes": 10, "seconds": 0.5, "detail": "so"}]) == [made_up]


def test_a_line_without_a_tier_is_about_home() -> None:
    lines: list[dict[str, Any]] = [{"t": 1, "event": "saved"}, {"t": 2, "event": "saved", "tier": ""}]
    assert [event.tier for event in parse_events(lines)] == ["home", "home"]


@given(st.dictionaries(st.sampled_from(NAMES), json_values), st.floats(-1e12, 1e12))
def test_any_line_is_parsed_into_an_event_with_valid_numbers(members: dict[str, Any], t: float) -> None:
    (event,) = parse_events([{**members, "t": t, "event": "saved"}])
    assert event.num_bytes >= 0
    assert 0 <= event.seconds < float("inf")
    assert event.step is None or event.step >= 0
    assert isinstance(event.tier, str)


def test_lines_of_all_files_are_sorted_by_time_without_invalid_ones(tmp_path: Any) -> None:
    store = open_store(tmp_path)
    store.append("history/a0001-rank-00000.jsonl", b'{"t":3,"event":"b"}\n{"t":1,"event":"a"}\n')
    store.append(
        "history/a0001-rank-00001.jsonl", b'{"t":2,"event":"c"}\n{"t":NaN,"event":"d"}\n[[[\n{"t":true'
    )
    store.append("history/notes.txt", b'{"t":2,"event":"e"}\n')
    lines, num_torn = read_lines(store)
    assert [line["event"] for line in lines] == ["a", "c", "b"]
    assert num_torn == 3


def test_a_path_that_is_not_utf_8_is_escaped() -> None:
    store = MemoryStore()
    path = os.fsdecode(b"runs/caf\xe9")
    line = {"t": 1.0, "event": "failed", "step": 3, "detail": f"no room in {path}", "tier": "home"}
    odd = {**line, "t": 2.0, "detail": "half \ud800"}
    text = "".join(json.dumps(one) + "\n" for one in (line, odd))
    store.append(names.history(1, 0), text.encode())
    lines, num_torn = read_lines(store)
    assert num_torn == 0
    assert [one["detail"] for one in lines] == [r"no room in runs/caf\xe9", r"half \ud800"]
    assert all(event.detail.isascii() for event in parse_events(lines))


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
