"""Profile of a step function in this process, with the watchers of a profiled script."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.train.tuning.findings import TuningReport
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.script_profile import Profile, RunSpec
from holdfast.train.tuning.tracker import StepTracker, StopRun
from holdfast.train.tuning.watchers import make_watcher


def profile_step(
    step: Callable[[Any], object], batches: Sequence[Any], *, num_steps: int, variant: str = ""
) -> TuningReport:
    """Return the report on a step's code; with a variant, eager and compiled steps are compared too."""
    profile = Profile(partial(measure, step, batches), RunSpec("steps", "step", (), num_steps), ("syncs",))
    if variant:
        profile.race(variant)
    return profile.report()


def measure(step: Callable[[Any], object], batches: Sequence[Any], spec: RunSpec) -> Any:
    loaders, results = LoaderMonitor(), list[Any]()
    tracker = StepTracker(make_watcher(spec, loaders, []), loaders, on_result=results.append)
    tracker.start()
    try:
        for batch in itertools.cycle(batches):
            step(batch)
    except StopRun:
        pass
    finally:
        tracker.stop()
    return results[0]
