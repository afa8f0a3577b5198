"""Judgement of a checkpoint: what counts against it, and what is not known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.health import Health, Squares, TensorHealth, Trend
from holdfast.watch.values.judgement import judge

FINE = TensorHealth(0, (), Squares(100.0, 1.0))
BEFORE = [Squares(100.0, 1.0)] * 3
STEADY, SPIKE, FEW = (
    Trend(False, "loss is within reason"),
    Trend(True, "loss is 9"),
    Trend(None, "few values"),
)


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
    tensors: list[TensorHealth | None], trend: Trend | None, before: list[Squares], healthy: bool | None
) -> None:
    assert judge(tensors, trend, before).healthy is healthy


def test_the_reasons_name_tensors_and_norms() -> None:
    bad = TensorHealth(12, tuple(f"w{i}" for i in range(8)), Squares(1e6, 1.0))
    assert judge([bad], SPIKE, BEFORE).reasons == (
        "NaN or infinity in w0, w1, w2, w3, w4, w5, w6, w7 and 4 more",
        "the norm of the parameters is 1000, usually 10",
        "loss is 9",
    )


@given(st.permutations([FINE, TensorHealth(0, (), Squares(3.0, None)), TensorHealth()]))
def test_norms_are_those_of_all_ranks(tensors: list[TensorHealth]) -> None:
    assert judge(tensors, STEADY).squares == Squares(103.0, 1.0)


def test_words() -> None:
    assert [Health(one).word for one in (True, False, None)] == ["healthy", "unhealthy", "unknown"]
