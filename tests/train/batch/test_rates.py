"""Rules for learning rates, accumulation, the choice of a batch, and what is kept of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.train.batch import BatchFit, Probe, accumulate_to, choose_batch, say_rates, scale_rates


def test_both_rules_are_given_and_that_of_the_optimizer_comes_first() -> None:
    rates = scale_rates(0.1, 16, 64, optimizer="AdamW")
    assert [(one.rule, one.rate) for one in rates] == [("square root", 0.2), ("linear", 0.4)]
    assert [one.rule for one in scale_rates(0.1, 16, 64, optimizer="SGD")] == ["linear", "square root"]
    said = say_rates(rates).splitlines()
    assert said[0].startswith("0.2 by the square root rule")
    assert "Malladi et al. 2022" in said[0]
    assert "Goyal et al. 2017" in said[1]


@given(st.floats(1e-6, 10), st.integers(1, 10**5), st.integers(1, 10**5))
def test_rules_lead_back_to_where_they_began(rate: float, here: int, there: int) -> None:
    for one in scale_rates(rate, here, there):
        back = next(other for other in scale_rates(one.rate, there, here) if other.rule == one.rule)
        assert math.isclose(back.rate, rate, rel_tol=1e-9)


@pytest.mark.parametrize("numbers", [(0.0, 1, 1), (0.1, 0, 1), (0.1, 1, 0)])
def test_rates_of_nothing_are_refused(numbers: tuple[float, int, int]) -> None:
    with pytest.raises(InvalidInput, match="cannot be scaled"):
        scale_rates(*numbers)


@given(st.integers(1, 10**4), st.integers(1, 500), st.integers(1, 64))
def test_accumulation_makes_the_global_batch_of_parts_that_fit(total: int, size: int, world: int) -> None:
    if total < world:
        with pytest.raises(InvalidInput, match="at least one"):
            accumulate_to(total, size, world)
        return
    plan = accumulate_to(total, size, world)
    assert plan.largest_part <= size
    assert plan.largest_part * plan.num_parts * world >= total
    assert (plan.num_parts - 1) * size * world < total  # one part less would not do


def test_the_smallest_batch_within_three_percent_of_the_best_is_taken() -> None:
    times = {1: 1.0, 8: 1.25, 16: 2.25, 32: 4.4, 64: 9.0}  # 1, 6.4, 7.11, 7.27, 7.11 samples per second
    probes = [Probe(size, None, True, step_s) for size, step_s in times.items()]
    assert choose_batch(probes) == 16
    assert choose_batch([*probes, Probe(128, None, False, 1.0)]) == 16
    with pytest.raises(InvalidInput, match="none can be chosen"):
        choose_batch([Probe(1, 1, True)])


def test_what_was_found_survives_as_plain_values() -> None:
    found = BatchFit()
    assert not found
    assert str(found) == "no batch has been searched for yet"
    found.size, found.largest, found.limit_bytes = 16, 40, 10**9
    found.probes = (Probe(16, 4 * 10**8, True, 0.5), Probe(41, None, False))
    again = BatchFit()
    again.load_state_dict(found.state_dict())
    assert again
    assert again.state_dict() == found.state_dict()
    assert str(again).splitlines()[1].split() == ["16", "400", "MB", "500.0", "ms", "32", "<-", "taken"]
    assert "does not fit" in str(again)
