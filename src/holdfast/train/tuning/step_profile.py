"""`holdfast.tune`: profile of a step function, for notebooks and scripts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from holdfast.errors import InvalidInput
from holdfast.train.batch.training_step import collect_training_state, restored
from holdfast.train.tuning import findings
from holdfast.train.tuning.findings import TuningReport
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.measurements import SourceLine
from holdfast.train.tuning.script_profile import Profile, RunSpec
from holdfast.train.tuning.tracker import StepTracker, StopRun, Watcher
from holdfast.train.tuning.watchers import watch_compiled, watch_graphs, watch_steps, watch_syncs


def tune(
    step: Callable[[Any], object],
    batches: Iterable[Any],
    state: Any,
    *,
    num_steps: int = 10,
    compile: bool = True,
    max_batches: int = 64,
) -> TuningReport:
    """Profile some training steps and report what would speed them up.

    Finds host syncs, graph breaks, recompiles and padding, and measures whether `torch.compile` pays.
    Afterwards `state` is restored bit for bit; other effects of the steps are not undone. For the data loader
    and the batch size, use `holdfast tune SCRIPT` and `holdfast.fit_batch`. Functions that this process has
    compiled are compiled again afterwards.

    Args:
        step: a function that runs forward, backward and one optimizer step on a batch.
        batches: some batches. The first `max_batches` are kept and reused.
        state: everything that the steps change: modules, optimizers, schedulers, tensors and generators, as
            for a Checkpointer.
        num_steps: steps to measure for each question.
        compile: compare compiled steps with eager ones, which takes as long as compiling takes.
        max_batches: number of batches to use.

    Raises:
        InvalidInput: `batches` is empty, or `step` does not step an optimizer.

    Ranks: call it on all ranks with the same arguments.
    Blocks: for the steps and the compilation.
    """
    kept = list(itertools.islice(batches, max_batches))
    if not kept:
        raise InvalidInput("tune() got no batches. Pass a data loader or a list of batches.")
    spec = RunSpec("steps", getattr(step, "__qualname__", "step"), (), num_steps)
    with restored(collect_training_state(state)):
        profile = Profile(partial(_measure, step, kept), spec, ("syncs", "shapes"))
        if compile:
            torch._dynamo.reset()
            profile.race("whole")
            torch._dynamo.reset()
        profile.findings += findings.find_compile(profile.steps, profile.verdicts)
        return profile.report()


def make_watcher(spec: RunSpec, loaders: LoaderMonitor, compiled_at: list[SourceLine]) -> Watcher:
    """Return the watcher for a question."""
    if spec.question == "steps":
        return partial(watch_steps, num_steps=spec.num_steps, loaders=loaders, compiled_at=compiled_at)
    if spec.question == "syncs":
        return partial(watch_syncs, num_steps=spec.num_steps)
    if spec.question == "graphs":
        return partial(watch_graphs, num_steps=spec.num_steps, compiles_itself=spec.compiles_itself)
    return partial(watch_compiled, variant=spec.variant, num_pairs=spec.num_steps)


def _measure(step: Callable[[Any], object], batches: Sequence[Any], spec: RunSpec) -> Any:
    """Return the measurements of some steps, as a specification has it."""
    loaders, results = LoaderMonitor(), []
    tracker = StepTracker(make_watcher(spec, loaders, []), loaders, on_result=results.append)
    tracker.start()
    try:
        for number, batch in enumerate(itertools.cycle(batches)):
            if number == 4 and not tracker.has_stepped:
                break
            step(batch)
    except StopRun:
        pass
    finally:
        tracker.stop()
    if not results:
        raise InvalidInput(
            "tune() called the step function with 4 batches, but no optimizer made a step. Pass a "
            "function for a complete training step: forward, backward, `optimizer.step()`."
        )
    return results[0]
