"""`holdfast.tune`: profile of a step function, for notebooks and scripts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from holdfast.errors import InvalidInput
from holdfast.train.batch.training_state import Snapshot, collect_training_state
from holdfast.train.tuning import findings
from holdfast.train.tuning.compiler_watchers import CompileWatcher, GraphWatcher
from holdfast.train.tuning.findings import TuningReport
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.measurements import (
    CompileMeasurements,
    CompileVerdict,
    GraphMeasurements,
    SourceLine,
    StepMeasurements,
    SyncMeasurements,
    judge_compile,
    measure_throughput,
)
from holdfast.train.tuning.sync_watcher import SyncWatcher
from holdfast.train.tuning.timing_watcher import TimingWatcher
from holdfast.train.tuning.tracker import StepTracker, StepWatcher, StopRun

T = TypeVar("T")


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
    with _restored(state):
        driver = _Driver(step, kept)
        loaders = LoaderMonitor()
        compiled_at: list[SourceLine] = []
        steps = driver.measure(
            TimingWatcher(num_steps, loaders, compiled_at=compiled_at), loaders, StepMeasurements
        )
        now = measure_throughput(steps.steps, steps.device)
        found = findings.find_padding(steps, paddings := findings.compare_lengths(steps.lengths))
        syncs = findings.find_syncs(
            driver.measure(SyncWatcher(num_steps), LoaderMonitor(), SyncMeasurements), now.step_s
        )
        graphs = driver.measure(
            GraphWatcher(num_steps, compiles_itself=False), LoaderMonitor(), GraphMeasurements
        )
        breaks = findings.find_breaks(graphs, syncs)
        recompiles = findings.find_recompiles(graphs, len(set(steps.shapes)))
        verdicts: list[CompileVerdict] = []
        if compile:
            torch._dynamo.reset()
            verdicts.append(
                judge_compile(
                    driver.measure(CompileWatcher("whole", num_steps), LoaderMonitor(), CompileMeasurements)
                )
            )
            torch._dynamo.reset()
        found += [
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


@contextlib.contextmanager
def _restored(state: Any) -> Iterator[None]:
    snapshot = Snapshot(collect_training_state(state))
    try:
        yield
    finally:
        snapshot.restore()


class _Driver:
    """Driver that runs the step function under one watcher after another."""

    def __init__(self, step: Callable[[Any], object], batches: Sequence[Any]) -> None:
        self._step, self._batches = step, batches

    def measure(self, watcher: StepWatcher, loaders: LoaderMonitor, kind: type[T]) -> T:
        """Return the measurements of a watcher."""
        results: list[Any] = []
        tracker = StepTracker(watcher, loaders, on_result=results.append)
        tracker.start()
        try:
            for number, batch in enumerate(itertools.cycle(self._batches)):
                if number == 4 and not tracker.num_stepped:
                    break
                self._step(batch)
        except StopRun:
            pass
        finally:
            tracker.stop()
        if not results:
            raise InvalidInput(
                "tune() called the step function with 4 batches, but no optimizer made a step. Pass a "
                "function for a complete training step: forward, backward, `optimizer.step()`."
            )
        assert isinstance(results[0], kind)
        return results[0]
