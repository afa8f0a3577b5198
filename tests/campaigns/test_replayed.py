"""Sums, tables and goals of replayed traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.append(BENCHMARKS)

import replayed  # noqa: E402  # pyright: ignore[reportMissingImports]
from replaying.progress import PARTS, Progress, sum_up  # noqa: E402  # pyright: ignore[reportMissingImports]

sys.path.remove(BENCHMARKS)  # its files would hide folders of tests with the same name


def attempt(number: int, first: int, last: int, begin_s: float) -> Progress:
    """Return an attempt with a step per second, which took a second for each part of its start."""
    start = tuple(begin_s - 4 + part for part in range(4))
    return Progress(number, tuple((step, begin_s + step - first) for step in range(first, last + 1)), start)


def test_steps_done_again_are_lost_and_not_useful() -> None:
    found = sum_up([attempt(1, 1, 10, 100.0), attempt(3, 8, 20, 120.0)], end_unix_s=125.5)
    assert found["useful_steps"] == 13 - 1  # step 13 was complete at 125 s
    assert found["lost_steps"] == 3
    assert found["restarts"] == 2
    (pause,) = found["pauses"]
    assert list(pause) == list(PARTS)
    assert sum(pause.values()) == pytest.approx(120 - 109)
    assert pause["until the command"] == pytest.approx(116 - 109)


def test_an_attempt_that_has_no_step_in_time_counts_what_it_resumed_with() -> None:
    found = sum_up([attempt(1, 1, 10, 100.0), attempt(2, 8, 20, 120.0)], end_unix_s=115.0)
    assert found["useful_steps"] == 7 - 1


def run(tool: str, number: int, goodput: float) -> dict[str, Any]:
    values = {"goodput": goodput, "cost_s": 1.0, "every": 5, "hour_s": 4.0, "lost_steps": 6, "restarts": 3}
    pause = dict.fromkeys(PARTS, 0.5)
    facts = {"state": "a trace", "contestant": tool, "title": tool, "round": number, "troubles": ["hang"]}
    return facts | {"pauses": [pause], "values": values}


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"traces": {"a trace": {"mtbf_h": 3.0, "share": 0.5, "nodes": 4}}, "runs": list(runs)}


def test_the_table_has_our_line_first_and_goodput_of_all_time() -> None:
    rows = replayed.rows(document(run("peer", 0, 0.9), run("holdfast", 0, 0.98)))
    assert [row[0] for row in rows] == ["**a trace**", "holdfast", "peer"]
    assert rows[1][1:3] == ["0.980", "0.490"]
    assert {len(row) for row in rows} == {len(replayed.HEADINGS)}


def test_a_goal_is_missed_by_a_peer_that_was_ahead_in_most_rounds() -> None:
    ours, theirs = (0.98, 0.97, 0.96), (0.90, 0.98, 0.99)
    runs = [run("holdfast", number, goodput) for number, goodput in enumerate(ours)]
    runs += [run("peer", number, goodput) for number, goodput in enumerate(theirs)]
    enough, ahead = replayed.judge(document(*runs))
    assert enough.passed
    assert ahead.found is not None
    assert ahead.found.spread.median == pytest.approx(0.97 / 0.98)
    assert ahead.passed is False
