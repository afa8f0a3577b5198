"""Judgement of a checkpoint: what counts against it, and what is not known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.sections import UNKNOWN, Health, Mark, Section, health_of
from holdfast.watch.values.contents import Squares, TensorHealth, judge

FINE = TensorHealth(0, (), Squares(100.0, 1.0))
BEFORE = [Squares(100.0, 1.0)] * 3
STEADY, SPIKE, FEW = (
    Section(1, {}, Mark.FOR, ("loss is within reason",)),
    Section(1, {}, Mark.AGAINST, ("loss is 9",)),
    Section(1, {}, Mark.NONE, ("few values",)),
)


def health(tensors: list[TensorHealth | None], trend: Section | None, before: list[Squares]) -> Health:
    """Health by the values and the trend of the metrics."""
    found = judge(tensors, before)
    sections = {"finite-values": Section(1, {}, found.mark, found.reasons)}
    return health_of(sections if trend is None else {**sections, "spike": trend})


@pytest.mark.parametrize(
    ("tensors", "trend", "before", "healthy"),
    [
        ([FINE, FINE], STEADY, [], True),
        ([FINE], None, BEFORE, True),  # nothing is recorded, but the norms are within reason
        ([FINE], FEW, [], None),
        ([FINE], None, [], None),
        ([FINE, None], STEADY, BEFORE, None),
        ([FINE], SPIKE, BEFORE, False),
        ([FINE, TensorHealth(1, ("w",), FINE.squares)], STEADY, BEFORE, False),
        ([None, TensorHealth(1, ("w",))], None, [], False),  # one bad tensor is enough
        ([TensorHealth(0, (), Squares(1e6, 1.0))], STEADY, BEFORE, False),
        ([TensorHealth(0, (), Squares(1e-6, 1.0))], STEADY, BEFORE, False),
        ([TensorHealth(0, (), Squares(1e6, 1.0))], STEADY, BEFORE[:2], True),  # too few to compare with
        ([TensorHealth(0, (), Squares(100.0, 1e6))], STEADY, BEFORE, False),
        ([TensorHealth(0, (), Squares(100.0, 0.0))], STEADY, BEFORE, True),  # gradients may become small
        ([TensorHealth()], STEADY, [Squares()] * 3, True),  # nothing to sum up
    ],
)
def test_a_state_is_healthy_if_all_is_known_and_nothing_is_wrong(
    tensors: list[TensorHealth | None], trend: Section | None, before: list[Squares], healthy: bool | None
) -> None:
    assert health(tensors, trend, before).healthy is healthy


def test_the_reasons_name_tensors_and_norms() -> None:
    bad = TensorHealth(12, tuple(f"w{i}" for i in range(8)), Squares(1e6, 1.0))
    assert health([bad], SPIKE, BEFORE).reasons == (
        "NaN or infinity in w0, w1, w2, w3, w4, w5, w6, w7 and 4 more",
        "the norm of the parameters is 1000, usually 10",
        "loss is 9",
    )


@given(st.permutations([FINE, TensorHealth(0, (), Squares(3.0, None)), TensorHealth()]))
def test_norms_are_those_of_all_ranks(tensors: list[TensorHealth]) -> None:
    assert judge(tensors).squares == Squares(103.0, 1.0)


def test_of_several_marks_the_greatest_counts_in_any_order() -> None:
    words = {Mark.NONE: "unknown", Mark.FOR: "healthy", Mark.UNSURE: "unknown", Mark.AGAINST: "unhealthy"}
    for marks in itertools.product(Mark, repeat=3):
        sections = {f"w{i}": Section(1, {}, mark, (mark.name,)) for i, mark in enumerate(marks)}
        found = health_of(sections)
        assert found.word == words[max(marks)]
        if found.healthy is False:
            assert set(found.reasons) == {"AGAINST"}
    assert health_of({}) == UNKNOWN
