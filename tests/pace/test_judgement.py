"""Verdicts about the pace of ranks: made-up ones, and trainings that others have recorded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.watch.pace.windows import PaceJudge, PaceWindow, RankWindow, SlowPeriod

NOISE = random.Random(1)


def rows(number: int, ranks: int, own: Callable[[int, int], float]) -> list[dict[int, float]]:
    """Return windows with the own time of each rank, by window and rank, and 3 % of noise."""
    return [
        {rank: own(window, rank) * NOISE.uniform(0.97, 1.03) for rank in range(ranks)}
        for window in range(number)
    ]


def window(number: int, row: dict[int, float], whole: float | None = None) -> PaceWindow:
    """Return a window with own times as shares of a step, by default of the slowest rank's own time."""
    whole = whole or max(row.values(), default=1.0)
    return PaceWindow(number, 1.0, {rank: RankWindow(own / whole, 0.0, 0.0) for rank, own in row.items()})


def judge(
    found: list[dict[int, float]], world_size: int = 0, wholes: Sequence[float | None] | None = None
) -> list[list[SlowPeriod]]:
    """Return the slow ranks after each window, the slowest first, since the number of a window."""
    judging = PaceJudge(world_size or len(found[0]), 1.0)
    slow: list[list[SlowPeriod]] = []
    for number, (row, whole) in enumerate(zip(found, wholes or [None] * len(found), strict=True)):
        judging.add(window(number, row, whole), {})
        slow.append(list(judging.slow.values()))
    return slow


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 100])
def test_one_slow_rank_is_named_with_its_factor_and_cost(ranks: int) -> None:
    found = judge(rows(30, ranks, lambda _, rank: 2.0 if rank == 1 else 1.0))[-1]
    assert [one.rank for one in found] == [1]
    assert found[0].factor == pytest.approx(2.0, rel=0.1)
    assert found[0].cost_share == pytest.approx(0.5, abs=0.05)


NOBODY: dict[str, tuple[int, Callable[[int, int], float]]] = {
    "even ranks": (8, lambda *_: 1.0),
    "slow for a few windows": (8, lambda window, rank: 3.0 if rank == 1 and 20 <= window < 24 else 1.0),
    "long work of another in each window": (4, lambda window, rank: 2.0 if rank == window * 7 % 4 else 1.0),
    "half of the ranks with more work": (8, lambda _, rank: 2.0 if rank % 2 else 1.0),
    "all become slow together": (4, lambda window, _: 2.0 if window >= 40 else 1.0),
    # A slower one of another kind would remain, so that all would wait as long without it.
    "cost nothing": (10, lambda _, rank: {0: 1.5, 1: 1.5, 2: 1.49, 3: 1.49, 4: 1.48}.get(rank, 1.0)),
}
"""Numbers of ranks whose own times blame none of them."""


@pytest.mark.parametrize(("ranks", "own"), NOBODY.values(), ids=NOBODY)
def test_nobody_is_named_where_no_rank_is_to_blame(ranks: int, own: Callable[[int, int], float]) -> None:
    assert not any(judge(rows(60, ranks, own)))


def test_few_windows_are_no_evidence() -> None:
    found = judge(rows(30, 4, lambda _, rank: 3.0 if rank == 1 else 1.0))
    assert [len(slow) for slow in found[:6]] == [0, 0, 0, 0, 0, 1]


def test_of_a_half_with_more_work_the_rank_that_becomes_slower_is_named() -> None:
    def own(window: int, rank: int) -> float:
        usual = 2.0 if rank % 2 else 1.0
        return 2 * usual if rank == 3 and window >= 40 else usual

    assert [one.rank for one in judge(rows(60, 8, own))[-1]] == [3]


def test_a_rank_is_slow_until_most_of_its_excess_is_gone() -> None:
    def own(window: int, rank: int) -> float:
        return 1.0 if rank != 2 or window >= 80 else 2.0 if window < 40 else 1.12

    found = judge(rows(100, 4, own))
    assert [one.rank for one in found[39]] == [2]
    assert [one.rank for one in found[78]] == [2], "the verdict does not flicker"
    assert not found[-1]


def test_windows_without_most_ranks_are_ignored() -> None:
    judging = PaceJudge(4, 1.0)
    for number, row in enumerate(rows(20, 4, lambda _, rank: 2.0 if rank == 1 else 1.0)):
        assert judging.add(window(2 * number, {0: 1.0, 1: 2.0}), {}) == []
        judging.add(window(2 * number + 1, row), {})
    assert list(judging.slow) == [1]


def test_shares_of_a_window_give_the_cost_as_a_share_of_all_time() -> None:
    (found,) = judge([{0: 0.2, 1: 0.5, 2: 0.2}] * 20, wholes=[1.0] * 20)[-1]
    assert found.cost_share == pytest.approx(0.3), "the rest of the time is communication of all"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 5), st.floats(0, 1), max_size=6), max_size=25))
def test_any_shares_have_a_verdict_within_bounds(windows: list[dict[int, float]]) -> None:
    for slow in judge(windows, 6, [1.0] * len(windows)):
        assert all(0 <= one.cost_share <= 1 for one in slow)
        assert {one.rank for one in slow} <= set(range(6))


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


def verdicts(name: str) -> list[list[SlowPeriod]]:
    """Return the slow ranks of a recorded training after each window."""
    trace = read(name)
    return judge(trace.rows, len({rank for row in trace.rows for rank in row}), trace.whole)


def named(found: list[list[SlowPeriod]]) -> set[int]:
    return {one.rank for slow in found for one in slow}


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
    assert last[0].factor == pytest.approx(2.35, abs=0.05)
    assert last[0].since_unix_s == 0
    # Their simulation of the job without this worker's slowness: 23.45 s of 46.34 s per step remain.
    assert last[0].cost_share == pytest.approx(1 - 23.45 / 46.34, abs=0.06)
    stages = verdicts("bytedance-ST")[-1]
    assert all(stage.factor == pytest.approx(1.62, abs=0.05) for stage in stages)


def test_workers_are_named_from_when_they_are_slow_until_they_no_longer_are() -> None:
    found = verdicts("alibaba-job-1")
    slow = [number for number, now in enumerate(found) if now]
    assert found[slow[0]][0].since_unix_s == 181, "its first slow mini-batch is in second 1811"
    assert slow == list(range(187, 196))
    assert not any(verdicts("alibaba-job-3")[:220])


def test_of_a_half_that_is_slower_those_that_became_slower_still_are_named_first() -> None:
    found = verdicts("alibaba-job-4")
    assert named(found) <= {0, 5, 6, 7, 8}, "the others are never slow"
    assert [worker.rank for worker in found[-1][:2]] == [5, 6], "they take 10 times as long in the end"
