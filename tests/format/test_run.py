"""The documents about a run round-trip."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from format.drawing import run_ids
from holdfast.errors import Corrupt, Unsupported
from holdfast.format.limits import MAX_ATTEMPT, MAX_RANKS, MAX_STEP
from holdfast.format.run import AttemptClaim, Done, Metrics, Run, document, parse
from holdfast.format.sealed import dumps, seal

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
runs = run_ids
times = st.floats(0, 1e12)
counts = st.integers(0, MAX_ATTEMPT)
sizes = st.integers(1, MAX_RANKS)
steps = st.integers(0, MAX_STEP)
values = (
    st.builds(Run, runs, times)
    | st.builds(AttemptClaim, counts, runs, sizes, text, counts, times)
    | st.builds(Done, runs, counts, steps, times)
)


def parse_as(like: Run | AttemptClaim | Done, text: bytes) -> Run | AttemptClaim | Done:
    if isinstance(like, Run):
        return parse(Run, text, "doc")
    return parse(AttemptClaim, text, "doc") if isinstance(like, AttemptClaim) else parse(Done, text, "doc")


@given(values)
def test_documents_round_trip(value: Run | AttemptClaim | Done) -> None:
    assert parse_as(value, document(value)) == value


@given(values, st.data())
def test_a_changed_byte_is_detected(value: Run | AttemptClaim | Done, data: st.DataObject) -> None:
    damaged = bytearray(document(value))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        parse_as(value, bytes(damaged))


@given(st.dictionaries(text, st.floats(allow_subnormal=True)))
def test_metrics_round_trip_including_nan_and_infinity(values: dict[str, float]) -> None:
    found = parse(Metrics, document(Metrics("id", 3, 500, values)), "doc")
    assert (found.run, found.attempt, found.step) == ("id", 3, 500)
    assert found.values.keys() == values.keys()
    for name, value in values.items():
        same_sign = math.copysign(1, value) == math.copysign(1, found.values[name])
        is_huge = abs(value) > 1.7e308 and math.isinf(found.values[name]) and same_sign
        assert (
            found.values[name] == value or is_huge or (math.isnan(value) and math.isnan(found.values[name]))
        )


@pytest.mark.parametrize("values", [[], {"loss": None}, {"loss": "1"}, {"loss": True}, {"loss": [1]}])
def test_metrics_that_are_not_numbers_are_corrupt(values: object) -> None:
    text = dumps(
        {"format": "holdfast-metrics", "version": 1, "run": "id", "attempt": 1, "step": 5, "values": values}
    )
    with pytest.raises(Corrupt):
        parse(Metrics, seal(text), "doc")


def test_a_document_of_another_kind_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="expected 'holdfast-done'"):
        parse(Done, document(Run("id", 1.0)), "doc")


def test_missing_members_are_corrupt_and_newer_versions_unsupported() -> None:
    with pytest.raises(Corrupt, match="lacks 'id'"):
        parse(Run, seal(dumps({"format": "holdfast-run", "version": 1})), "doc")
    with pytest.raises(Unsupported, match="version 7"):
        parse(Run, seal(dumps({"format": "holdfast-run", "version": 7})), "doc")
