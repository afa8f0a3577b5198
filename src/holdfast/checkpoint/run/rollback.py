"""Rollback of a training: the samples that are left out from now on, and the durable record of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from holdfast.checkpoint.format.health import MAX_REASON_CHARS
from holdfast.checkpoint.format.run import MAX_ROLLBACK_KEYS, Rollback
from holdfast.checkpoint.home.patience import Patience
from holdfast.checkpoint.home.rollbacks import write_rollback
from holdfast.checkpoint.keeper import KeeperConfig
from holdfast.checkpoint.restore.request import Restored
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.skipped_samples import Range, range_to_skip
from holdfast.checkpoint.run.spike_response import PlannedRollback
from holdfast.checkpoint.state import Skippable

Position = tuple[int, tuple[Range, ...]]
"""Position of an object that can skip samples, and the ranges that it has skipped."""


def positions_of(objects: Mapping[str, Skippable]) -> dict[str, Position]:
    """Return the positions of the objects that can skip samples, by key."""
    return {key: (one.position, one.skipped) for key, one in objects.items()}


def ranges_to_skip(
    before: Mapping[str, Position],
    objects: Mapping[str, Skippable],
    plan: PlannedRollback,
    *,
    restored_step: int,
    extra_steps: int,
) -> dict[str, Range]:
    """Return the range that each object leaves out, by key.

    Args:
        before: positions before the restore.
        objects: the objects, restored.
        plan: the rollback.
        restored_step: step of the restored checkpoint.
        extra_steps: steps whose samples are left out beyond.
    """
    return {
        key: range_to_skip(
            one.position,
            *before[key],
            num_steps=plan.last_step - restored_step,
            in_a_row=plan.in_a_row,
            extra_steps=extra_steps,
        )
        for key, one in objects.items()
        if key in before
    }


def record_rollback(
    components: Components,
    config: KeeperConfig,
    plan: PlannedRollback,
    found: Restored,
    ranges: Mapping[str, Range],
    kept: Sequence[str],
) -> Rollback:
    """Write the record of a rollback into home, and return it.

    Args:
        config: of the attempt that ends.
        plan: the rollback.
        found: the restored checkpoint.
        ranges: samples that are left out, by key.
        kept: keys of the objects that stayed at their position.

    Raises:
        HoldfastError: home could not be written to, for as long as a restore retries.

    Ranks: collective.
    Blocks: until it is durable.
    """
    rollback = Rollback(
        run=config.run,
        attempt=config.attempt,
        base_attempt=found.attempt,
        base_step=found.step,
        first_step=plan.first_step,
        last_step=plan.last_step,
        in_a_row=plan.in_a_row,
        reason=plan.reason[:MAX_REASON_CHARS],
        skipped=dict(list(ranges.items())[:MAX_ROLLBACK_KEYS]),
        kept=tuple(kept[:MAX_ROLLBACK_KEYS]),
        noted_unix_s=time.time(),
    )
    tiers = components.tiers
    patience = Patience(tiers.restore_patience_s, components.show)
    components.ranks.of_rank_0(
        lambda: patience.spend(tiers.home, lambda: write_rollback(tiers.durable_stores(), rollback))
    )
    return rollback
