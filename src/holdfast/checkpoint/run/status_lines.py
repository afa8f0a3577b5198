"""Status lines of a run: the restored checkpoint, the steps that are left, and doubts about resuming."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.format.run import Rollback
from holdfast.checkpoint.restore.stages import Restored
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.going_back import describe_skipped_samples, rewound_streams
from holdfast.checkpoint.run.restoration import describe_saved_steps, describe_skipped
from holdfast.errors import ResumeWarning
from holdfast.system.callsite import warn
from holdfast.system.log import get_logger
from holdfast.system.units import format_bytes, format_duration

_log = get_logger("checkpoint.run")


def show_restored(components: Components, found: Restored) -> None:
    """Show which checkpoint was restored, from where, and which were skipped for it."""
    for line in (*describe_skipped(found), *describe_saved_steps(found)):
        components.show(line)
    rate = f"{format_bytes(found.num_bytes)} in {format_duration(found.seconds)}"
    where = f"from {components.tiers.describe_sources(found.sources)} ({rate}, verified)"
    components.done.read()
    if components.done.step == found.step:
        components.show(f"this run was finished at step {found.step}; restored that step {where}")
    else:
        components.show(f"restored step {found.step} {where}")


def show_what_is_left(components: Components, step: int, total: int) -> None:
    """Show that a finished run has nothing left to train, or is trained further."""
    if step and step >= total:
        components.show(
            f"all {total} steps are done, so nothing is trained; to train further, raise the total of "
            f"steps({total})"
        )
    elif components.done.step == step:
        components.show(f"training continues from step {step} to step {total}")


def show_rollback(components: Components, rollback: Rollback, watch: str) -> None:
    """Log a line about a rollback that a watch has asked for, on rank 0."""
    if components.ranks.rank == 0:
        _log.warning(
            "%s: %s. Training went back from step %d to step %d of attempt %d; %s.",
            watch.upper(),
            rollback.reason,
            rollback.last_step,
            rollback.base_step,
            rollback.base_attempt,
            describe_skipped_samples(rollback.skipped, rollback.kept),
        )


def warn_of_samples(found: Restored, unknown: Sequence[str], *, has_kept: bool) -> None:
    """Warn of samples that rollbacks have left out, and that come again after a restore.

    Args:
        unknown: keys of objects that the state does not have.
        has_kept: the objects that only iterate stayed at their position.
    """
    for text in found.rollbacks.unreadable:
        warn(
            f"The record of a rollback cannot be read, so its samples come again: {text} Bring the file back "
            "from a copy.",
            ResumeWarning,
        )
    if unknown:
        warn(
            f"Rollbacks have left out samples of {', '.join(map(repr, unknown))}, and the state has no "
            "object of that name that can skip, so these samples come again. Use the same key, or rename=.",
            ResumeWarning,
        )
    rewound = None if has_kept else rewound_streams(found.rollbacks, found.checkpoint_id)
    if rewound is not None:
        rollback, keys = rewound
        warn(
            f"Step {found.step} of attempt {found.attempt} is from before the rollback of attempt "
            f"{rollback.attempt}, and {', '.join(map(repr, keys))} cannot skip, so the samples from "
            f"step {rollback.first_step} on come again. An object with `position` and `skip` would not.",
            ResumeWarning,
        )


def warn_of_gradients(components: Components) -> None:
    """Warn of gradients that no optimizer has used."""
    saved = components.pipeline.objects.saved_addresses()
    gradients = [
        one for one in components.pipeline.stager.hook.unused_gradients() if one.data_ptr() not in saved
    ]
    if not any(one.any() for one in gradients):
        return
    if not all(one.isfinite().all() for one in gradients):
        return  # a gradient scaler has left out this update
    warn(
        "The run will not resume exactly: gradients were accumulated that no optimizer has used yet, and "
        "gradients are not saved. Count the optimizer's steps in steps(), or make every= a multiple of the "
        "accumulation.",
        ResumeWarning,
    )


def warn_of_doubts(components: Components, *, is_new_run: bool) -> None:
    """Warn of state that will not resume exactly; in a new run suggest `holdfast check`."""
    pipeline = components.pipeline
    doubts = pipeline.objects.review(pipeline.stager.hook.stepped(), has_live_objects=components.has_state)
    components.watching.notify("reviewed", doubts)
    for doubt in doubts:
        warn(f"The run will not resume exactly: {doubt.text}", doubt.category)
    objects = components.pipeline.objects
    if components.watching.goes_back is not None and not (objects.skippables() or objects.streams()):
        warn(
            "Training may go back, and the state has no object that can skip samples. After a rollback an "
            "iterator of the loop continues where it is, so the samples since then are left out until the "
            "next start. Batches that depend on the step number or on random numbers come again. Add a "
            "sampler with `position` and `skip` to the state.",
            ResumeWarning,
        )
    if is_new_run:
        name = Path(sys.argv[0]).name
        script = name if name.endswith(".py") else "train.py"
        components.show(f"to see whether resuming is exact: holdfast check {script} [ARGS]")
