"""`holdfast.tune`: profile of a step function, for notebooks and scripts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from holdfast.errors import InvalidInput
from holdfast.train.batch.training_state import Snapshot, collect_training_state
from holdfast.train.tuning import findings
from holdfast.train.tuning.compiler_watchers import CompileWatcher, GraphWatcher
from holdfast.train.tuning.findings import TuningReport
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.measurements import judge_compile, measure_throughput
from holdfast.train.tuning.sync_watcher import SyncWatcher
from holdfast.train.tuning.timing_watcher import TimingWatcher
from holdfast.train.tuning.tracker import StepTracker, StepWatcher, StopRun, T


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
    snapshot = Snapshot(collect_training_state(state))
    try:
        return _profile(step, kept, num_steps, compares_compiled=compile)
    finally:
        snapshot.restore()


def _profile(
    step: Callable[[Any], object], batches: Sequence[Any], num_steps: int, *, compares_compiled: bool
) -> TuningReport:
    def measure(watcher: StepWatcher[T], loaders: LoaderMonitor | None = None) -> T:
        return _measure(step, batches, watcher, loaders or LoaderMonitor())

    loaders = LoaderMonitor()
    steps = measure(TimingWatcher(num_steps, loaders, compiled_at=[]), loaders)
    now = measure_throughput(steps.steps, steps.device)
    paddings = findings.compare_lengths(steps.lengths)
    syncs = findings.find_syncs(measure(SyncWatcher(num_steps)), now.step_s)
    graphs = measure(GraphWatcher(num_steps, compiles_itself=False))
    breaks = findings.find_breaks(graphs, syncs)
    recompiles = findings.find_recompiles(graphs, len(set(steps.shapes)))
    verdicts = []
    if compares_compiled:
        torch._dynamo.reset()
        verdicts.append(judge_compile(measure(CompileWatcher("whole", num_steps))))
        torch._dynamo.reset()
    found = [
        *findings.find_padding(steps, paddings),
        *breaks,
        *findings.exclude_lines(syncs, breaks),
        *findings.exclude_lines(recompiles, breaks),
        *findings.find_compile(steps, verdicts),
    ]
    failures = (f"graphs: the compiler cannot trace the model: {graphs.failure}",) if graphs.failure else ()
    return TuningReport(
        script=getattr(step, "__qualname__", "step"),
        steps=steps,
        throughput=now,
        findings=tuple(sorted(found, key=lambda one: -(one.share or 0.0))),
        verdicts=tuple(verdicts),
        paddings=paddings,
        unanswered=failures,
    )


def _measure(
    step: Callable[[Any], object], batches: Sequence[Any], watcher: StepWatcher[T], loaders: LoaderMonitor
) -> T:
    """Return the measurements of a watcher over some steps."""
    results: list[T] = []
    tracker = StepTracker(watcher, loaders, on_result=results.append)
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
