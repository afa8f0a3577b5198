"""How often a run should have saved: Young's and Daly's best interval, and how sure its figures are; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_EXPONENT = 700.0  # of a double's exp()


@dataclass(frozen=True, slots=True)
class Best:
    """The interval that loses least, for one mean time between failures."""

    mtbf_s: float
    young_s: float
    daly_s: float
    lost_share: float  # see `lost_share`, at Daly's interval


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Young's first-order best time of training between two saves, in seconds.

    Args:
        cost_s: what one save takes from training.
        mtbf_s: mean time between failures.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order best time of training between two saves, in seconds.

    Args:
        cost_s: what one save takes from training.
        mtbf_s: mean time between failures.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
        Generation Computer Systems 22(3), 2006.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Time that saves and work done again cost, as a share of the training; inf if it never gets done.

    Restarts come on top; they cost the same at every interval.

    Args:
        interval_s: time of training between two saves.
        cost_s: what one save takes from training.
        mtbf_s: mean time between failures, which come at random.

    Source: Daly 2006, the exact expectation for failures that do not depend on each other.
    """
    ratio = (interval_s + cost_s) / mtbf_s
    return math.inf if ratio > _MAX_EXPONENT else max(0.0, mtbf_s * math.expm1(ratio) / interval_s - 1)


def best(cost_s: float, mtbf_s: float) -> Best | None:
    """The best interval; None if saves cost nothing or nothing is known, and then there is none."""
    if cost_s <= 0 or mtbf_s <= 0:
        return None
    daly = daly_s(cost_s, mtbf_s)
    return Best(mtbf_s, young_s(cost_s, mtbf_s), daly, lost_share(daly, cost_s, mtbf_s))


def mtbf_bounds_s(up_s: float, num_failures: int, *, confidence: float = 0.9) -> tuple[float, float]:
    """Between which bounds the mean time between failures lies, in seconds; the upper one is inf without any.

    Args:
        up_s: time in which failures could happen.
        num_failures: that did.
        confidence: how sure the bounds are; half of the rest lies on each side.

    Source: exact bounds for the rate of a Poisson process (Garwood 1936).
    """
    tail = (1 - confidence) / 2
    most = _poisson_mean(num_failures, tail)
    least = 0.0 if num_failures == 0 else _poisson_mean(num_failures - 1, 1 - tail)
    return up_s / most, math.inf if least == 0 else up_s / least


def _poisson_mean(count: int, chance: float) -> float:
    """The mean with which `count` or fewer have this chance."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, middle) > chance else (low, middle)
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """The chance of `count` or fewer, in logarithms so that many failures do not overflow."""
    if mean <= 0:
        return 1.0
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))
