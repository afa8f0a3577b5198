"""Status lines of a run: the restored checkpoint, the steps that are left, and doubts about resuming."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.callsite import warn
from holdfast.checkpointer.components import Components
from holdfast.checkpointer.restoration import describe_skipped
from holdfast.errors import ResumeWarning
from holdfast.restore.request import Restored
from holdfast.units import format_bytes, format_duration


def show_restored(components: Components, found: Restored) -> None:
    """Show which checkpoint was restored, from where, and which were skipped for it."""
    for line in describe_skipped(found):
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


def warn_of_loaders(components: Components) -> None:
    """Warn of data loaders that are being read and will not resume."""
    for doubt in components.pipeline.objects.review_loaders():
        warn(f"The run will not resume exactly: {doubt}", ResumeWarning)


def warn_of_doubts(components: Components, *, is_new_run: bool) -> None:
    """Warn of state that will not resume exactly; in a new run suggest `holdfast check`."""
    for doubt in components.pipeline.objects.review(has_live_objects=components.has_state):
        warn(f"The run will not resume exactly: {doubt.text}", ResumeWarning)
    if is_new_run:
        name = Path(sys.argv[0]).name
        script = name if name.endswith(".py") else "train.py"
        components.show(f"to see whether resuming is exact: holdfast check {script} [ARGS]")
