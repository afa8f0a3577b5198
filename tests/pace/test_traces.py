"""Verdicts about trainings that others have recorded, beside the causes that they published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.watch.pace.judgement import PaceJudge, PaceVerdict

TRACES = Path(__file__).with_name("traces")


@dataclass(frozen=True, slots=True)
class Trace:
    """Own times of all ranks by window, and the durations of known steps."""

    rows: list[dict[int, float]]
    whole: list[float | None]


def read(name: str) -> Trace:
    lines = [one for one in (TRACES / f"{name}.csv").read_text().splitlines() if not one.startswith("#")]
    columns = lines[0].split(",")
    cells = [dict(zip(columns, line.split(","), strict=True)) for line in lines[1:]]
    return Trace(
        [{int(name): float(one) for name, one in row.items() if name != "step" and one} for row in cells],
        [float(row["step"]) if "step" in row else None for row in cells],
    )


def verdicts(name: str) -> list[PaceVerdict]:
    """Return the verdict after each window."""
    trace, judge = read(name), PaceJudge()
    world_size = len({rank for row in trace.rows for rank in row})
    return [
        judge.add(row, world_size=world_size, whole_s=whole)
        for row, whole in zip(trace.rows, trace.whole, strict=True)
    ]


def named(found: list[PaceVerdict]) -> set[int]:
    return {one.rank for verdict in found for one in verdict.slow}


def test_the_worker_that_was_slowed_is_named_with_its_cost() -> None:
    found = verdicts("bytedance-AR")
    assert named(found) == {0}
    last = found[-1]
    assert last.slow[0].factor == pytest.approx(2.35, abs=0.05)
    assert last.slow[0].since == 0
    # Their simulation of the job without this worker's slowness: 23.45 s of 46.34 s per step remain.
    assert last.cost_share == pytest.approx(1 - 23.45 / 46.34, abs=0.06)


def test_the_last_stage_of_a_pipeline_is_named() -> None:
    found = verdicts("bytedance-ST")
    assert named(found) == {6, 7}
    assert all(one.factor == pytest.approx(1.62, abs=0.05) for one in found[-1].slow)


def test_nobody_is_named_where_sequence_lengths_differ_from_step_to_step() -> None:
    assert named(verdicts("bytedance-SE")) == set()


def test_a_worker_that_becomes_slow_in_the_middle_is_named_and_then_no_longer() -> None:
    found = verdicts("alibaba-job-1")
    assert named(found) == {6}
    slow = [number for number, one in enumerate(found) if one.slow]
    assert found[slow[0]].slow[0].since == 181, "its first slow mini-batch is in second 1811"
    assert slow == list(range(187, 196))


def test_small_constant_differences_name_nobody() -> None:
    assert named(verdicts("alibaba-job-2")) == set()


def test_several_workers_that_become_slow_at_the_end_are_named() -> None:
    found = verdicts("alibaba-job-3")
    assert named(found) == {6, 7, 9}
    assert not any(one.slow for one in found[:220])


def test_of_a_half_that_is_slower_those_that_became_slower_still_are_named_first() -> None:
    found = verdicts("alibaba-job-4")
    assert named(found) <= {0, 5, 6, 7, 8}, "the others are never slow"
    assert [one.rank for one in found[-1].slow[:2]] == [5, 6], "they take 10 times as long in the end"
