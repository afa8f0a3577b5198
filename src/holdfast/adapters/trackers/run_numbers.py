"""Numbers of a run for a tracker: saves, restores, rollbacks, lost steps and goodput, from its history."""

from __future__ import annotations

from holdfast.adapters.trackers.newest_steps import OWN_PREFIX
from holdfast.checkpoint.store import open_store
from holdfast.watch.report.open_metrics import metric_families
from holdfast.watch.report.summary import read_summary

_NAMES = {
    "holdfast_restores": "restores",
    "holdfast_steps_lost": "steps_lost",
    "holdfast_goodput_ratio": "goodput",
    "holdfast_checkpoint_step": "checkpoint_step",
}
"""Names in a tracker of numbers that `holdfast metrics` has."""


def read_run_numbers(home: str) -> dict[str, float]:
    """Return the numbers of the run in a home, by their names in a tracker. Unknown ones are left out.

    Raises:
        HoldfastError: the home could not be read.
    """
    summary = read_summary(open_store(home))
    families = {one.name: one.samples for one in metric_families(summary, home)}
    found = {ours: float(families[name][0][1]) for name, ours in _NAMES.items() if name in families}
    found["saves"] = sum(
        value for labels, value in families.get("holdfast_saves", ()) if labels["outcome"] == "durable"
    )
    found["rollbacks"] = len(summary.rollbacks)
    return {OWN_PREFIX + name: value for name, value in found.items()}
