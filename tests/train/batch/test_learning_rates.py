"""Scaled learning rates, gradient accumulation, the choice of a size, and the saved result."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.train.batch import BatchFit, Probe, choose_size, format_rates, plan_accumulation, scale_rates


def test_the_rule_for_the_optimizer_comes_first() -> None:
    rates = scale_rates(0.1, 16, 64, optimizer="AdamW")
    assert [(one.rule, one.rate) for one in rates] == [("square root", 0.2), ("linear", 0.4)]
    assert [one.rule for one in scale_rates(0.1, 16, 64, optimizer="SGD")] == ["linear", "square root"]
    lines = format_rates(rates).splitlines()
    assert lines[0].startswith("0.2 by the square root rule")
    assert "Malladi et al. 2022" in lines[0]
    assert "Goyal et al. 2017" in lines[1]


@given(st.floats(1e-6, 10), st.integers(1, 10**5), st.integers(1, 10**5))
def test_scaling_there_and_back_gives_the_first_rate(rate: float, here: int, there: int) -> None:
    for one in scale_rates(rate, here, there):
        back = next(other for other in scale_rates(one.rate, there, here) if other.rule == one.rule)
        assert math.isclose(back.rate, rate, rel_tol=1e-9)


@pytest.mark.parametrize("numbers", [(0.0, 1, 1), (0.1, 0, 1), (0.1, 1, 0)])
def test_numbers_that_are_not_positive_are_rejected(numbers: tuple[float, int, int]) -> None:
    with pytest.raises(InvalidInput, match="cannot be scaled"):
        scale_rates(*numbers)


@given(st.integers(1, 10**4), st.integers(1, 500), st.integers(1, 64))
def test_accumulation_reaches_the_global_batch_with_micro_batches_that_fit(
    total: int, size: int, world: int
) -> None:
    if total < world:
        with pytest.raises(InvalidInput, match="at least one"):
            plan_accumulation(total, size, world)
        return
    plan = plan_accumulation(total, size, world)
    assert plan.micro_batch_size <= size
    assert plan.micro_batch_size * plan.num_micro_batches * world >= total
    assert (plan.num_micro_batches - 1) * size * world < total  # one micro-batch less would not suffice


def test_the_smallest_size_within_three_percent_of_the_best_is_chosen() -> None:
    times = {1: 1.0, 8: 1.25, 16: 2.25, 32: 4.4, 64: 9.0}  # 1, 6.4, 7.11, 7.27, 7.11 samples per second
    probes = [Probe(size, None, True, step_s) for size, step_s in times.items()]
    assert choose_size(probes) == 16
    assert choose_size([*probes, Probe(128, None, False, 1.0)]) == 16
    with pytest.raises(InvalidInput, match="Cannot choose a batch size"):
        choose_size([Probe(1, 1, True)])


def test_a_result_survives_its_state_dict() -> None:
    result = BatchFit()
    assert not result
    assert str(result) == "no batch size found yet"
    result.size, result.largest, result.limit_bytes = 16, 40, 10**9
    result.probes = (Probe(16, 4 * 10**8, True, 0.5), Probe(41, None, False))
    again = BatchFit()
    again.load_state_dict(result.state_dict())
    assert again
    assert again.state_dict() == result.state_dict()
    assert str(again).splitlines()[1].split() == ["16", "400", "MB", "500.0", "ms", "32", "<-", "chosen"]
    assert "does not fit" in str(again)
