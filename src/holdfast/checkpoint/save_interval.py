"""Best interval between saves by Young and Daly, and confidence bounds of its inputs; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_EXPONENT = 700.0  # of a double's exp()


@dataclass(frozen=True, slots=True)
class BestInterval:
    """Interval with the least loss, for one mean time between failures."""

    mtbf_s: float
    young_s: float
    daly_s: float
    lost_share: float  # see `lost_share`, at Daly's interval


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's first-order best time of training between two saves, in seconds.

    Args:
        cost_s: training time lost per save.
        mtbf_s: mean time between failures.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order best time of training between two saves, in seconds.

    Args:
        cost_s: training time lost per save.
        mtbf_s: mean time between failures.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
        Generation Computer Systems 22(3), 2006.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the share of training lost to saves and repeated work, or inf.

    Restarts come on top. They cost the same at every interval.

    Args:
        interval_s: training time between two saves.
        cost_s: training time lost per save.
        mtbf_s: mean time between failures, which occur at random.

    Source: Daly 2006, the exact expectation for independent failures.
    """
    ratio = (interval_s + cost_s) / mtbf_s
    return math.inf if ratio > _MAX_EXPONENT else max(0.0, mtbf_s * math.expm1(ratio) / interval_s - 1)


def best_interval(cost_s: float, mtbf_s: float) -> BestInterval | None:
    """Return the best interval, or None if the inputs are not positive."""
    if cost_s <= 0 or mtbf_s <= 0:
        return None
    daly = daly_s(cost_s, mtbf_s)
    return BestInterval(mtbf_s, young_s(cost_s, mtbf_s), daly, lost_share(daly, cost_s, mtbf_s))


def mtbf_bounds_s(up_s: float, num_failures: int, *, confidence: float = 0.9) -> tuple[float, float]:
    """Return the confidence bounds of the mean time between failures, in seconds.

    The upper bound is inf without failures.

    Args:
        up_s: time in which failures could happen.
        num_failures: number of failures.
        confidence: confidence of both bounds together.

    Source: exact bounds for the rate of a Poisson process (Garwood 1936).
    """
    tail = (1 - confidence) / 2
    most = _poisson_mean(num_failures, tail)
    least = 0.0 if num_failures == 0 else _poisson_mean(num_failures - 1, 1 - tail)
    return up_s / most, math.inf if least == 0 else up_s / least


def _poisson_mean(count: int, chance: float) -> float:
    """Return the mean that gives `count` or fewer events this probability."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, middle) > chance else (low, middle)
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """Return the probability of `count` or fewer events, in logarithms to avoid overflow."""
    if mean <= 0:
        return 1.0
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))
