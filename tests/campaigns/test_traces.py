"""Failure traces of the benchmark `goodput.py`: parsed, cut into parts, and scaled into schedules."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.replaying import collection
from benchmarks.replaying.schedule import Interruption, Trace, Trouble, from_counts, scale
from benchmarks.replaying.traces import (
    LLAMA_CAUSES,
    LLAMA_MTBF_H,
    parse_bamboo,
    parse_infinitehbd,
    parse_parcae,
    parse_skypilot,
    sample_llama,
)

COUNTS = st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(0, 6)), min_size=2, max_size=40)


def trace_of(gaps: list[tuple[float, int]], needed: int) -> Trace:
    """Return the trace of counts, after a first moment with all nodes."""
    moments = itertools.accumulate(gap for gap, _ in gaps)
    counts = [(0.0, 6), *((at_h, count) for at_h, (_, count) in zip(moments, gaps, strict=True))]
    return from_counts("counts", 4, counts, needed=needed, troubles=[Trouble.NODE, Trouble.NOTICE])


@given(COUNTS, st.integers(1, 6))
def test_the_time_left_is_the_time_with_enough_nodes(gaps: list[tuple[float, int]], needed: int) -> None:
    before, with_enough_h, last_enough_h, now_h = 6, 0.0, 0.0, 0.0
    for gap_h, count in gaps:
        now_h += gap_h
        if before >= needed:
            with_enough_h, last_enough_h = with_enough_h + gap_h, now_h
        before = count
    found = trace_of(gaps, needed)
    assert found.available_h == pytest.approx(with_enough_h)
    assert found.hours == pytest.approx(now_h if gaps[-1][1] >= needed else last_enough_h, abs=1e-9)


@given(COUNTS, st.integers(1, 6))
def test_each_loss_of_a_node_while_the_job_could_run_interrupts_it(
    gaps: list[tuple[float, int]], needed: int
) -> None:
    counts = [6, *(count for _, count in gaps)]
    losses = sum(one >= needed and after < one for one, after in itertools.pairwise(counts))
    found = len(trace_of(gaps, needed).interruptions)
    is_open = counts[-1] < needed  # the last outage does not end, so the trace ends where it begins
    assert found == losses - is_open


@given(COUNTS, st.integers(1, 6), st.integers(1, 3), st.floats(1.0, 200.0), st.floats(0.0, 5.0))
@example([(0.2017204232205282, 0), (0.2017204232205282, 0), (1.0, 1)], 1, 1, 1.0, 0.0)  # rounds upwards
def test_a_schedule_leaves_the_wanted_time_per_interruption(
    gaps: list[tuple[float, int]], needed: int, count: int, mtbf_s: float, max_outage_s: float
) -> None:
    trace = trace_of(gaps, needed)
    for number in range(len(trace.interruptions) // count):
        part = trace.window(number, count)
        schedule = scale(part, mtbf_s, max_outage_s=max_outage_s)
        assert schedule.available_s == pytest.approx(mtbf_s * count)
        assert [event.trouble for event in schedule.events] == [one.trouble for one in part.interruptions]
        free_s = free_h = 0.0
        for event, one in zip(schedule.events, part.interruptions, strict=True):
            assert event.outage_s <= max_outage_s
            gap_s = (one.at_h - free_h) * schedule.hour_s
            assert event.at_s - free_s == pytest.approx(gap_s, abs=1e-6)
            free_s, free_h = event.at_s + event.outage_s, one.at_h + one.outage_h


@given(COUNTS, st.integers(1, 6), st.integers(1, 4))
def test_windows_of_a_trace_have_each_interruption_once(
    gaps: list[tuple[float, int]], needed: int, count: int
) -> None:
    trace = trace_of(gaps, needed)
    parts = [trace.window(number, count) for number in range(len(trace.interruptions) // count)]
    kinds = [one.trouble for part in parts for one in part.interruptions]
    assert kinds == [one.trouble for one in trace.interruptions[: len(kinds)]]
    assert all(len(part.interruptions) == count for part in parts)


def test_overlapping_interruptions_are_refused() -> None:
    pair = (Interruption(1.0, Trouble.NODE, 2.0), Interruption(2.0, Trouble.NODE))
    with pytest.raises(ValueError, match="an interruption at 2"):
        Trace("bad", 1, pair, 10.0)


def test_a_trace_without_enough_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 5 nodes"):
        from_counts("few", 1, [(0.0, 1), (1.0, 2)], needed=5, troubles=[Trouble.NODE])


def test_skypilots_ticks_become_outages() -> None:
    text = json.dumps({"metadata": {"gap_seconds": 1800}, "data": [0, 4, 4, 3, 2, 4, 4, 4, 0]})
    trace = parse_skypilot(text, "sky")
    assert trace.interruptions == (Interruption(1.0, Trouble.NOTICE, 1.0),)
    assert (trace.hours, trace.share, trace.num_nodes) == (3.5, 2.5 / 3.5, 4)


def test_bamboos_steps_are_losses_of_a_job_on_half_of_the_machines() -> None:
    trace = parse_bamboo(
        "0,0\n3600,0\n3600,8\n7200,8\n7200,6\n10800,6\n10800,3\n14400,3\n14400,4\n18000,4\n", "b", unit_s=1
    )
    assert trace.interruptions == (Interruption(1.0, Trouble.NOTICE), Interruption(2.0, Trouble.NODE, 1.0))
    assert trace.hours == 4.0


def test_parcaes_removals_interrupt_the_job() -> None:
    details = {"duration": 60000}
    lines = [
        [0, "add", {"nodes": ["a", "b", "c", "d"], **details}],
        [60000, "no-op", {"nodes": [], **details}],
        [120000, "remove", {"nodes": ["a"], **details}],
        [180000, "migration", {"nodes": [], **details}],
    ]
    trace = parse_parcae("\n".join(map(json.dumps, lines)), "p")
    assert [one.at_h for one in trace.interruptions] == [pytest.approx(2 / 60)]
    assert trace.hours == pytest.approx(4 / 60)


def test_faults_of_infinitehbd_become_troubles_of_their_class() -> None:
    def event(day: float, kind: str, level: str, name: str) -> dict[str, object]:
        return {"event_time": day, "event_type": kind, "fault_type": {"Level": level, "Class": name}}

    text = json.dumps(
        [
            event(1.0, "fault_start", "Hardware Failure", "GPU"),
            event(1.5, "fault_end", "Hardware Failure", "GPU"),
            event(2.0, "fault_start", "Hardware Failure", "NIC"),
            event(2.5, "fault_start", "Software Failure", "File System"),
            event(3.0, "fault_start", "Software Failure", "Software Tool"),
            event(4.0, "fault_end", "Software Failure", "Software Tool"),
        ]
    )
    trace = parse_infinitehbd(text, "hbd")
    kinds = [Trouble.NODE, Trouble.HANG, Trouble.DISK, Trouble.RANK]
    assert [(one.at_h, one.trouble) for one in trace.interruptions] == list(
        zip([24, 48, 60, 72], kinds, strict=True)
    )
    assert trace.hours == 96


def test_llamas_causes_are_the_published_ones_at_their_rate() -> None:
    assert len(LLAMA_CAUSES) == 18
    assert sum(number for _, number, _ in LLAMA_CAUSES) == 419
    assert {kind for _, _, kind in LLAMA_CAUSES} == set(Trouble)
    trace = sample_llama(7, 4000)
    assert trace.mtbf_h == pytest.approx(LLAMA_MTBF_H, rel=0.1)
    lost = sum(one.trouble is Trouble.NODE for one in trace.interruptions) / 4000
    assert lost == pytest.approx(248 / 419, abs=0.03)
    assert sample_llama(7, 20) == sample_llama(7, 20) != sample_llama(8, 20)


def test_the_traces_of_the_repository_can_be_read() -> None:
    found = {one.name: one for one in collection.read_all(None)}
    assert set(found) == {"Llama 3 causes", "InfiniteHBD", "Bamboo g4dn", "Parcae hh"}
    assert found["Parcae hh"].share == 1.0
    assert 0.5 < found["Bamboo g4dn"].share < 1.0
    assert all(one.mtbf_h > 0 for one in found.values())
