"""The documents about a run round-trip."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from format.drawing import run_ids
from holdfast.checkpoint.format.limits import MAX_ATTEMPT, MAX_RANKS, MAX_STEP
from holdfast.checkpoint.format.run import (
    AttemptClaim,
    Done,
    Metrics,
    Refusal,
    Rollback,
    Run,
    SkippedNote,
    document,
    parse,
)
from holdfast.checkpoint.format.sealed import dumps, seal, unseal_lines
from holdfast.errors import Corrupt
from making import resealed

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
runs = run_ids
times = st.floats(0, 1e12)
counts = st.integers(0, MAX_ATTEMPT)
sizes = st.integers(1, MAX_RANKS)
steps = st.integers(0, MAX_STEP)
samples = st.integers(0, 2**53 - 1)
ranges = st.tuples(samples, samples).map(lambda pair: (min(pair), max(pair)))
rollbacks = st.builds(
    Rollback,
    run=runs, attempt=counts, base_attempt=counts, base_step=steps, first_step=steps, last_step=steps,
    in_a_row=st.integers(1, MAX_ATTEMPT), reason=text, noted_unix_s=times,
    skipped=st.dictionaries(text, ranges, max_size=4), kept=st.lists(text, max_size=4).map(tuple),
)  # fmt: skip
values = (
    st.builds(Run, runs, times)
    | st.builds(AttemptClaim, counts, runs, sizes, text, counts, times)
    | st.builds(Done, runs, counts, steps, times)
    | st.builds(
        Refusal, runs, counts, steps, text, st.none() | st.integers(0, MAX_RANKS - 1), st.none() | text
    )
    | st.builds(SkippedNote, runs, counts, steps, text, times)
    | rollbacks
)
SmallDocument = Run | AttemptClaim | Done | Refusal | SkippedNote | Rollback


def parse_as(like: SmallDocument, text: bytes) -> SmallDocument:
    kind: Any = type(like)
    return parse(kind, text, "doc")


@given(values)
def test_documents_round_trip(value: SmallDocument) -> None:
    assert parse_as(value, document(value)) == value


@given(st.dictionaries(text, st.floats(allow_subnormal=True)))
def test_metrics_round_trip_including_nan_and_infinity(values: dict[str, float]) -> None:
    found = parse(Metrics, document(Metrics("id", 3, 500, values)), "doc")
    assert (found.run, found.attempt, found.step) == ("id", 3, 500)
    assert found.values.keys() == values.keys()
    for name, value in values.items():
        same_sign = math.copysign(1, value) == math.copysign(1, found.values[name])
        is_huge = abs(value) > 1.7e308 and math.isinf(found.values[name]) and same_sign
        are_nan = math.isnan(value) and math.isnan(found.values[name])
        assert found.values[name] == value or is_huge or are_nan


@pytest.mark.parametrize("values", [[], {"loss": None}, {"loss": "1"}, {"loss": True}, {"loss": [1]}])
def test_metrics_that_are_not_numbers_are_corrupt(values: object) -> None:
    head = {"format": "holdfast-metrics", "version": 1, "run": "id", "attempt": 1, "step": 5}
    with pytest.raises(Corrupt):
        parse(Metrics, seal(dumps({**head, "values": values})), "doc")


@pytest.mark.parametrize(
    ("member", "value"),
    [
        *(("skipped", {"data": one}) for one in ([3, 2], [-1, 2], [1], [1, 2, 3], "1", [1.5, 2])),
        *(("skipped", {str(one): [0, 1] for one in range(65)}), ("skipped", [[0, 1]])),
        *(("kept", [1]), ("kept", ["a"] * 65), ("in_a_row", 0), ("base_step", -1), ("reason", "x" * 1001)),
    ],
)
@given(rollbacks)
def test_a_rollback_outside_of_the_limits_is_corrupt(member: str, value: object, rollback: Rollback) -> None:
    changed = resealed(unseal_lines(document(rollback), "doc"), {member: value})
    with pytest.raises(Corrupt, match=member if member != "skipped" else "skipped|data"):
        parse(Rollback, changed, "doc")


def test_missing_members_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="missing required field `id`"):
        parse(Run, seal(dumps({"format": "holdfast-run", "version": 1})), "doc")
