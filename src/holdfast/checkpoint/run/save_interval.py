"""Interval between saves of `every="auto"`: the run's own failures, and the record of the choice."""

from __future__ import annotations

import contextlib

from holdfast.checkpoint.home.history import FailureRate, read_failures
from holdfast.checkpoint.keeper import Keeper
from holdfast.checkpoint.policy import MIN_FAILURES, EveryAuto
from holdfast.checkpoint.run.components import Components
from holdfast.errors import HoldfastError
from holdfast.system.units import format_duration, plural

_CHANGE = 1.5
"""Change of the interval from which it is recorded again."""


class SaveInterval:
    """Interval that the policy of one attempt chooses, on rank 0."""

    def __init__(self, components: Components, policy: EveryAuto) -> None:
        self._components, self._policy = components, policy
        self._failures: FailureRate | None = None
        self._noted_s: float | None = None
        self._noted_reason = ""

    def begin(self, keeper: Keeper) -> None:
        """Read the failures of the attempts before, if the policy uses them."""
        with contextlib.suppress(HoldfastError):  # without them the budget decides, as in a new run
            failures = read_failures(self._components.tiers.home_store, before=keeper.config.attempt)
            if failures.num_failures >= MIN_FAILURES:
                self._failures, self._components.cadence.mtbf_s = failures, failures.mtbf_s

    def note(self, step: int, keeper: Keeper) -> None:
        """Record the interval and its reason, if it has changed much since the last record."""
        cadence = self._components.cadence
        cost_s = cadence.meter.save_cost_s
        if cost_s is None:
            return
        found = self._policy.choose(cost_s, cadence.meter.durable_s, cadence.mtbf_s)
        last_s, is_same = self._noted_s, found.reason == self._noted_reason
        if is_same and last_s is not None and last_s / _CHANGE <= found.interval_s <= last_s * _CHANGE:
            return
        self._noted_s, self._noted_reason = found.interval_s, found.reason
        failures = self._failures
        known = (
            f"; {plural(failures.num_failures, 'failure')} in {format_duration(failures.up_s)} of training"
            if failures is not None
            else ""
        )
        detail = f"a save every {format_duration(found.interval_s)}, by {found.reason}; a save costs "
        keeper.record(
            "interval",
            step=step,
            seconds=found.interval_s,
            detail=f"{detail}{format_duration(cost_s)}{known}",
        )
