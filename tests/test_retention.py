"""Retention: which checkpoints stay, which is the best, and which a newer attempt left behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.retention import Keep, best_first, line_of
from holdfast.errors import InvalidInput

Found = list[CheckpointId]
checkpoints = st.builds(CheckpointId, st.integers(1, 5), st.integers(0, 50))
ids = st.lists(checkpoints, unique=True, min_size=1)


@given(ids, st.integers(1, 5), st.none() | st.integers(1, 10))
def test_keep_always_keeps_the_newest_and_what_it_promises(found: Found, last: int, keep_every: int | None):
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
    found: Found, last: int, best: int, mode: str, drawn: list[float | None]
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
    ("options", "reason"),
    [
        ({"last": 0}, "at least 1"),
        ({"best": 1}, "needs a metric"),
        ({"best": 0, "metric": "loss"}, "at least 1"),
        ({"best": 1, "metric": "loss", "mode": "least"}, "mode must be"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, Any], reason: str):
    with pytest.raises(InvalidInput, match=reason):
        Keep(**options)


def test_keep_none_keeps_everything():
    line = [CheckpointId(1, step) for step in range(9, 0, -1)]
    assert Keep(None).kept(line) == set(line)


TWICE_BACK = [(1, 100), (1, 200), (1, 300), (2, 250), (2, 350), (3, 220)]
LINES = {
    # Attempt 1 reached 500; attempt 2 began from 400 (500 was damaged) and committed 450.
    "left behind by a newer attempt": (
        *([(1, 300), (1, 400), (1, 500), (2, 450)], [(1, 400)]),
        *([(2, 450), (1, 400), (1, 300)], [(1, 500)]),
    ),
    "the newer attempt committed nothing": ([(1, 400), (1, 500)], [], [(1, 500), (1, 400)], []),
    "a fresh start": ([(1, 400), (2, 10)], [], [(2, 10)], [(1, 400)]),
    "going back twice": (
        *(TWICE_BACK, [(1, 100)]),
        *([(3, 220), (1, 100)], [(2, 350), (2, 250), (1, 300), (1, 200)]),
    ),
    # Attempt 2 resumed from 200 of attempt 1, attempt 3 from 250 of attempt 2.
    "resuming twice": (
        *([*TWICE_BACK[:-1], (3, 260)], [(1, 200), (2, 250)]),
        *([(3, 260), (2, 250), (1, 200), (1, 100)], [(2, 350), (1, 300)]),
    ),
    # Attempt 4 restored 350 of attempt 2, which attempt 3 had left behind.
    "going back by hand to a superseded checkpoint": (
        *([*TWICE_BACK, (4, 360)], [(1, 200), (2, 350)]),
        *([(4, 360), (2, 350), (2, 250), (1, 200), (1, 100)], [(3, 220), (1, 300)]),
    ),
    "going back within an attempt": (
        *([(1, 100), (1, 200), (2, 150), (2, 300), (2, 160)], [(1, 100), (2, 150)]),
        *([(2, 160), (2, 150), (1, 100)], [(2, 300), (1, 200)]),
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_of_the_newest_checkpoint_is_what_it_continues(name: str):
    """The last of the found checkpoints is the newest; both parts of the line are newest first."""
    found, ancestors, current, superseded = ([CheckpointId(*one) for one in some] for some in LINES[name])
    line = line_of(found, found[-1], ancestors)
    assert (list(line.current), list(line.superseded)) == (current, superseded)


@given(ids, st.lists(checkpoints, max_size=4).map(sorted))
def test_every_checkpoint_is_current_or_superseded(found: Found, ancestors: Found):
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
