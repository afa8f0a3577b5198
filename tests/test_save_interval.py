"""Young's and Daly's intervals, against the exact expectation and known tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.checkpoint.policy import best_interval, daly_s, lost_share, mtbf_bounds_s, young_s

costs = st.floats(1e-3, 1e3)
mtbfs = st.floats(1.0, 1e7)


def test_young_is_the_square_root_of_twice_cost_times_mtbf() -> None:
    assert young_s(50.0, 10_000.0) == pytest.approx(1000.0)


def test_a_known_value_of_daly() -> None:
    """Cost 5 min, failures every 24 h: 17280 s2 under the root and ratio 1/576."""
    young = math.sqrt(2 * 300 * 86400)
    assert daly_s(300.0, 86400.0) == pytest.approx(young * (1 + 1 / 72 + 1 / 5184) - 300)


def test_if_a_save_costs_more_than_twice_the_mtbf_daly_is_the_mtbf() -> None:
    assert daly_s(25.0, 12.0) == 12.0


@given(costs, mtbfs)
def test_no_interval_loses_much_less_than_dalys(cost_s: float, mtbf_s: float) -> None:
    """For cheap saves, the closed form is near the optimum of the exact expectation."""
    assume(cost_s < mtbf_s / 2)
    at_daly = lost_share(daly_s(cost_s, mtbf_s), cost_s, mtbf_s)
    others = (lost_share(young_s(cost_s, mtbf_s) * 2 ** (i / 8), cost_s, mtbf_s) for i in range(-48, 49))
    assert at_daly <= min(others) * 1.03 + 1e-9


@given(costs, mtbfs)
def test_young_and_daly_agree_when_saves_cost_next_to_nothing(cost_s: float, mtbf_s: float) -> None:
    assume(cost_s < mtbf_s * 1e-4)
    assert daly_s(cost_s, mtbf_s) == pytest.approx(young_s(cost_s, mtbf_s), rel=0.01)


@given(st.floats(0.1, 1e4), costs, mtbfs)
def test_costly_saves_and_short_mtbf_never_lose_less(interval_s: float, cost_s: float, mtbf_s: float) -> None:
    lost = lost_share(interval_s, cost_s, mtbf_s)
    assert lost >= 0
    assert lost_share(interval_s, cost_s * 2, mtbf_s) >= lost - 1e-9
    assert lost_share(interval_s, cost_s, mtbf_s / 2) >= lost - 1e-9


def test_training_that_never_completes_has_an_infinite_loss() -> None:
    assert lost_share(1e6, 1.0, 1.0) == math.inf


def test_free_saves_have_no_best_interval() -> None:
    assert best_interval(0.0, 100.0) is None


@pytest.mark.parametrize(
    ("num_failures", "least", "most"),
    # Half of the 5 % and 95 % points of chi-square with 2n and 2n + 2 degrees of freedom, as tables have it.
    [(0, None, 2.996), (1, 0.0513, 4.744), (5, 1.970, 10.513), (10, 5.425, 16.962), (30, 21.594, 40.690)],
)
def test_bounds_of_the_mtbf_match_tables(num_failures: int, least: float | None, most: float) -> None:
    low, high = mtbf_bounds_s(1000.0, num_failures)
    assert low == pytest.approx(1000 / most, rel=1e-3)
    assert high == (math.inf if least is None else pytest.approx(1000 / least, rel=1e-3))


@given(st.integers(1, 300), st.floats(1.0, 1e8))
def test_the_estimate_is_between_the_bounds(num_failures: int, up_s: float) -> None:
    low, high = mtbf_bounds_s(up_s, num_failures)
    assert low < up_s / num_failures < high
