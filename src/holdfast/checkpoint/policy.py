"""Policies of when to save, and the best interval between saves; pure, with the clock passed in."""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from msgspec import Struct
from typing_extensions import override

from holdfast.errors import InvalidInput
from holdfast.system.units import parse_duration


class Moment(Struct, frozen=True):
    """Facts that a save policy bases its decision on."""

    step: int  # optimizer steps completed
    now_s: float  # monotonic clock
    saved_step: int  # step of the last save, or where this attempt began
    saved_s: float  # monotonic clock at that time
    save_cost_s: float | None = None  # training time lost per save, measured; None before the first
    durable_s: float | None = None  # from save() to durable, measured; None before the first
    mtbf_s: float | None = None  # mean time between the run's own failures; None for too few of them


class Every(ABC):
    """Policy of when to save. Policies compose with `|`: a save is due when any of them is."""

    timed: bool = True
    """True if the answer depends on a clock; then rank 0 decides for all ranks."""

    @abstractmethod
    def due(self, moment: Moment) -> bool:
        """Return True if a save is due after `moment.step`."""

    def __or__(self, other: Every) -> Every:
        return AnyOf((self, other))


@dataclass(frozen=True, slots=True)
class EverySteps(Every):
    """Policy to save after each multiple of `steps`."""

    steps: int
    timed = False

    @override
    def due(self, moment: Moment) -> bool:
        return moment.step > moment.saved_step and moment.step % self.steps == 0


@dataclass(frozen=True, slots=True)
class EveryTime(Every):
    """Policy to save when `seconds` have passed since the last save."""

    seconds: float

    @override
    def due(self, moment: Moment) -> bool:
        return moment.step > moment.saved_step and moment.now_s - moment.saved_s >= self.seconds


MIN_FAILURES = 3
"""Failures of a run from which they count for the interval between its saves."""


class IntervalChoice(Struct, frozen=True):
    """Interval between saves, in seconds, with its reason."""

    interval_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class EveryAuto(Every):
    """Policy to save as often as pays, within `budget` of all time.

    The first save comes after `first_steps` steps, to measure what one costs. A save is never due before
    the last one could have become durable. Once the run has failed a few times, the interval is the best one
    for its own failures, by Daly's formula, if that is longer than the budget asks for.
    """

    budget: float = 0.01
    first_steps: int = 10

    @override
    def due(self, moment: Moment) -> bool:
        if moment.save_cost_s is None:
            return moment.step - moment.saved_step >= self.first_steps
        interval_s = self.choose(moment.save_cost_s, moment.durable_s, moment.mtbf_s).interval_s
        return moment.step > moment.saved_step and moment.now_s - moment.saved_s >= interval_s

    def choose(self, cost_s: float, durable_s: float | None, mtbf_s: float | None) -> IntervalChoice:
        """Return the interval between saves, and its reason.

        Args:
            cost_s: training time lost per save.
            durable_s: time until a save is durable; None if it is not known.
            mtbf_s: mean time between the run's own failures; None for too few of them.
        """
        best = None if mtbf_s is None else best_interval(cost_s, mtbf_s)
        choices = [
            IntervalChoice(cost_s / self.budget, f"the budget of {self.budget:.3g} of the time"),
            IntervalChoice(durable_s or 0.0, "the time until a save is durable"),
        ]
        if best is not None:
            choices.append(IntervalChoice(best.daly_s, "Daly's formula for the run's own failures"))
        return max(choices, key=lambda one: one.interval_s)


@dataclass(frozen=True, slots=True)
class AnyOf(Every):
    """Policy to save when any of `policies` is due."""

    policies: tuple[Every, ...]

    @property
    @override
    def timed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - derived here, fixed elsewhere
        return any(policy.timed for policy in self.policies)

    @override
    def due(self, moment: Moment) -> bool:
        return any(policy.due(moment) for policy in self.policies)


def every(value: int | str | datetime.timedelta | Every) -> Every:
    """Return the policy of an `every=` argument: 500, "10m", a timedelta, "auto" or a policy."""
    if isinstance(value, Every):
        return value
    if value == "auto":
        return EveryAuto()
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise InvalidInput(f"every must be a positive number of steps, got {value}.")
        return EverySteps(value)
    if isinstance(value, (str, datetime.timedelta)):
        return EveryTime(parse_duration(value, "every"))
    raise InvalidInput(f"every must be steps (500), a duration ('10m'), 'auto' or a policy, got {value!r}.")


def single_policies(value: int | str | datetime.timedelta | Every | None) -> tuple[Every, ...]:
    """Return the single policies of an `every=` argument; a save is due when any of them is."""
    if value is None:
        return ()
    policy = every(value)
    if isinstance(policy, AnyOf):
        return tuple(one for inner in policy.policies for one in single_policies(inner))
    return (policy,)


# Below, `cost_s` is the training time lost per save, and `mtbf_s` the mean time between failures.

_MAX_EXPONENT = 700.0  # of a double's exp()


class BestInterval(Struct, frozen=True):
    """Interval with the least loss, for one mean time between failures."""

    mtbf_s: float
    young_s: float
    daly_s: float
    lost_share: float  # see `lost_share`, at Daly's interval


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's first-order best time of training between two saves, in seconds.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order best time of training between two saves, in seconds.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
        Generation Computer Systems 22(3), 2006.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the share of training lost to saves and repeated work, or inf.

    Failures occur at random. Restarts come on top, and cost the same at every interval.

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
    """Return the confidence bounds of the mean time between failures, in seconds; inf without failures.

    Args:
        up_s: time in which failures could happen.
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
