"""Retention: which checkpoints stay, which is the best, and which a newer attempt left behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.retention import CheckpointLine, Keep, best_first, line_of
from holdfast.errors import InvalidInput


def make_line(
    found: Sequence[tuple[int, int]], newest: tuple[int, int], ancestors: Sequence[tuple[int, int]]
) -> CheckpointLine:
    """The line of a checkpoint; each is given as its attempt and step."""
    every, older = ([CheckpointId(*one) for one in some] for some in (found, ancestors))
    return line_of(every, CheckpointId(*newest), older)


def test_keep_refuses_to_keep_nothing():
    with pytest.raises(InvalidInput, match="at least 1"):
        Keep(0)


checkpoints = st.builds(CheckpointId, st.integers(1, 5), st.integers(0, 50))
ids = st.lists(checkpoints, unique=True, min_size=1)


@given(ids, st.integers(1, 5), st.none() | st.integers(1, 10))
def test_keep_always_keeps_the_newest_and_what_it_promises(
    found: list[CheckpointId], last: int, keep_every: int | None
):
    line = sorted(found, reverse=True)
    kept = Keep(last, keep_every).kept(line)
    assert line[0] in kept
    assert set(line[:last]) <= kept
    assert all(item in line[:last] or (keep_every and item.step % keep_every == 0) for item in kept)


@given(
    ids,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["min", "max"]),
    st.lists(st.floats() | st.none(), min_size=30, max_size=30),
)
def test_keep_keeps_the_best_and_the_newest_and_nothing_else(
    found: list[CheckpointId], last: int, best: int, mode: str, drawn: list[float | None]
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
    line = [CheckpointId(2, 40), CheckpointId(1, 30), CheckpointId(1, 20), CheckpointId(1, 10)]
    values = {CheckpointId(1, 10): 1.0, CheckpointId(1, 20): 1.0, CheckpointId(1, 30): 2.0}
    assert best_first(line, values, "min") == [(1, 20), (1, 10), (1, 30)]
    assert best_first(line, values, "max") == [(1, 30), (1, 20), (1, 10)]


@pytest.mark.parametrize(
    "options", [{"best": 1}, {"best": 0, "metric": "loss"}, {"best": 1, "metric": "loss", "mode": "least"}]
)
def test_a_policy_of_the_best_that_makes_no_sense_is_refused(options: dict[str, Any]):
    with pytest.raises(InvalidInput):
        Keep(**options)


def test_keep_none_keeps_everything():
    line = [CheckpointId(1, step) for step in range(9, 0, -1)]
    assert Keep(None).kept(line) == set(line)


def test_what_a_newer_attempt_left_behind_is_superseded():
    """Attempt 1 reached 500; attempt 2 began from 400 (500 was damaged) and committed 450."""
    line = make_line(
        [CheckpointId(1, 300), CheckpointId(1, 400), CheckpointId(1, 500), CheckpointId(2, 450)],
        CheckpointId(2, 450),
        [CheckpointId(1, 400)],
    )
    assert line.current == ((2, 450), (1, 400), (1, 300))
    assert line.superseded == ((1, 500),)


def test_an_attempt_that_committed_nothing_supersedes_nothing():
    line = make_line([(1, 400), (1, 500)], (1, 500), [])
    assert line.current == ((1, 500), (1, 400))
    assert line.superseded == ()


def test_a_fresh_start_supersedes_all_that_was_there():
    line = make_line([(1, 400), (2, 10)], (2, 10), [])
    assert line.current == ((2, 10),)
    assert line.superseded == ((1, 400),)


TWICE_BACK = [
    CheckpointId(1, 100),
    CheckpointId(1, 200),
    CheckpointId(1, 300),
    CheckpointId(2, 250),
    CheckpointId(2, 350),
    CheckpointId(3, 220),
]


def test_going_back_twice_hides_what_both_left_behind():
    line = make_line(TWICE_BACK, (3, 220), [(1, 100)])
    assert line.current == ((3, 220), (1, 100))
    assert set(line.superseded) == {(1, 200), (1, 300), (2, 250), (2, 350)}


def test_resuming_twice_keeps_the_checkpoint_of_each_resume():
    """Attempt 2 resumed from 200 of attempt 1, attempt 3 from 250 of attempt 2."""
    line = make_line(
        [*TWICE_BACK[:-1], CheckpointId(3, 260)],
        CheckpointId(3, 260),
        [CheckpointId(1, 200), CheckpointId(2, 250)],
    )
    assert line.current == ((3, 260), (2, 250), (1, 200), (1, 100))
    assert set(line.superseded) == {(2, 350), (1, 300)}


def test_going_back_by_hand_to_a_superseded_checkpoint_makes_its_line_current():
    """Attempt 4 restored 350 of attempt 2, which attempt 3 had left behind."""
    line = make_line(
        [*TWICE_BACK, CheckpointId(4, 360)],
        CheckpointId(4, 360),
        [CheckpointId(1, 200), CheckpointId(2, 350)],
    )
    assert line.current == ((4, 360), (2, 350), (2, 250), (1, 200), (1, 100))
    assert set(line.superseded) == {(3, 220), (1, 300)}


def test_going_back_within_an_attempt_hides_what_it_saved_in_between():
    line = make_line(
        [
            CheckpointId(1, 100),
            CheckpointId(1, 200),
            CheckpointId(2, 150),
            CheckpointId(2, 300),
            CheckpointId(2, 160),
        ],
        CheckpointId(2, 160),
        [CheckpointId(1, 100), CheckpointId(2, 150)],
    )
    assert line.current == ((2, 160), (2, 150), (1, 100))
    assert set(line.superseded) == {(2, 300), (1, 200)}


@given(ids, st.lists(checkpoints, max_size=4).map(sorted))
def test_every_checkpoint_is_current_or_superseded_by_where_the_line_left_its_attempt(
    found: list[CheckpointId], ancestors: list[CheckpointId]
):
    """Both newest first; current is what lies at or before the last step that the line has of its attempt."""
    newest = max(found)
    older = [one for one in ancestors if one.attempt < newest.attempt]
    line = line_of(found, newest, older)
    assert sorted(line.current + line.superseded) == sorted(found)
    assert list(line.current) == sorted(line.current, reverse=True)
    assert list(line.superseded) == sorted(line.superseded, reverse=True)
    assert line.current[0] == newest
    for one in found:
        left_at = [other.step for other in [*older, newest] if other.attempt == one.attempt]
        assert (one in line.current) == bool(left_at and one.step <= left_at[-1])
