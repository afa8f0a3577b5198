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
        judge.add(number, row, world_size=world_size, whole_s=whole)
        for number, (row, whole) in enumerate(zip(trace.rows, trace.whole, strict=True))
    ]


def named(found: list[PaceVerdict]) -> set[int]:
    return {one.rank for verdict in found for one in verdict.slow}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("bytedance-AR", {0}),  # one worker was slowed
        ("bytedance-ST", {6, 7}),  # the last stage of a pipeline
        ("bytedance-SE", set()),  # sequence lengths differ from step to step
        ("alibaba-job-1", {6}),
        ("alibaba-job-2", set()),  # small constant differences
        ("alibaba-job-3", {6, 7, 9}),  # they become slow at the end
    ],
)
def test_the_workers_of_the_published_cause_are_named(name: str, ranks: set[int]) -> None:
    assert named(verdicts(name)) == ranks


def test_slow_workers_are_named_with_their_factor_and_cost() -> None:
    last = verdicts("bytedance-AR")[-1]
    assert last.slow[0].factor == pytest.approx(2.35, abs=0.05)
    assert last.slow[0].since == 0
    # Their simulation of the job without this worker's slowness: 23.45 s of 46.34 s per step remain.
    assert last.cost_share == pytest.approx(1 - 23.45 / 46.34, abs=0.06)
    stages = verdicts("bytedance-ST")[-1].slow
    assert all(stage.factor == pytest.approx(1.62, abs=0.05) for stage in stages)


def test_workers_are_named_from_when_they_are_slow_until_they_no_longer_are() -> None:
    found = verdicts("alibaba-job-1")
    slow = [number for number, verdict in enumerate(found) if verdict.slow]
    assert found[slow[0]].slow[0].since == 181, "its first slow mini-batch is in second 1811"
    assert slow == list(range(187, 196))
    assert not any(verdict.slow for verdict in verdicts("alibaba-job-3")[:220])


def test_of_a_half_that_is_slower_those_that_became_slower_still_are_named_first() -> None:
    found = verdicts("alibaba-job-4")
    assert named(found) <= {0, 5, 6, 7, 8}, "the others are never slow"
    assert [worker.rank for worker in found[-1].slow[:2]] == [5, 6], "they take 10 times as long in the end"
