"""`holdfast.tune`: the same questions for a step function of one's own, in a notebook or a script."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from holdfast.errors import InvalidInput
from holdfast.train.batch.snapshot import Snapshot
from holdfast.train.batch.training_state import collect_training_state
from holdfast.train.tuning import findings as finding
from holdfast.train.tuning import sizes
from holdfast.train.tuning.facts import Graphs, Place, Race, Steps, Syncs
from holdfast.train.tuning.graphs import GraphWatch
from holdfast.train.tuning.loaders import Loaders
from holdfast.train.tuning.probe import Enough, Probe, Watcher
from holdfast.train.tuning.racing import Racing
from holdfast.train.tuning.report import Report
from holdfast.train.tuning.stepping import Stepping
from holdfast.train.tuning.syncs import SyncWatch
from holdfast.train.tuning.verdict import Verdict, judge, pace

T = TypeVar("T")


def tune(
    step: Callable[[Any], object],
    batches: Iterable[Any],
    state: Any,
    *,
    num_steps: int = 10,
    compile: bool = True,
    max_batches: int = 64,
) -> Report:
    """Run some steps of a training and say what would make them quicker.

    Looks for host syncs, graph breaks, recompiles and padding, and whether `torch.compile` pays. What `state`
    holds is put back bit for bit afterwards; what else the steps change is not known here. Whether the loader
    keeps up, and which batch pays, is asked by `holdfast tune SCRIPT` and `holdfast.fit_batch`. What this
    process has compiled is compiled anew afterwards.

    Args:
        step: takes a batch through forward, backward and one optimizer step.
        batches: some batches; the first `max_batches` are kept and given again and again.
        state: what the steps change: modules, optimizers, schedulers, tensors and generators, as for a
            Checkpointer.
        num_steps: measured steps for each question.
        compile: race compiled steps against eager ones, which takes as long as compiling takes.
        max_batches: how many batches are looked at.

    Raises:
        InvalidInput: there are fewer than two batches, or `step` steps no optimizer.

    Ranks: with several, all call it alike.
    Blocks: for the steps and the compiling.
    """
    kept = list(itertools.islice(batches, max_batches))
    if not kept:
        raise InvalidInput(
            "tune needs some batches, and was given none: give a loader, or a list of batches."
        )
    with _as_before(state):
        asking = _Loop(step, kept)
        loaders = Loaders()
        compiled_at: list[Place] = []
        steps = asking.ask(Stepping(num_steps, loaders, compiled_at=compiled_at), loaders, Steps)
        now = pace(steps.steps, steps.device)
        found = sizes.find_padding(steps, paddings := sizes.compare(steps.lengths))
        syncs = finding.find_syncs(asking.ask(SyncWatch(num_steps), Loaders(), Syncs), now.step_s)
        graphs = asking.ask(GraphWatch(num_steps, compiles_itself=False), Loaders(), Graphs)
        breaks = finding.find_breaks(graphs, syncs)
        recompiles = finding.find_recompiles(graphs, len(set(steps.shapes)))
        verdicts: list[Verdict] = []
        if compile:
            torch._dynamo.reset()
            verdicts.append(judge(asking.ask(Racing("whole", num_steps), Loaders(), Race)))
            torch._dynamo.reset()
        found += [
            *breaks,
            *finding.without(syncs, breaks),
            *finding.without(recompiles, breaks),
            *finding.find_compile(steps, verdicts),
        ]
    trouble = (f"graphs: the compiler cannot trace the model: {graphs.failure}",) if graphs.failure else ()
    return Report(
        script=getattr(step, "__qualname__", "step"),
        steps=steps,
        pace=now,
        findings=tuple(sorted(found, key=lambda one: -(one.share or 0.0))),
        verdicts=tuple(verdicts),
        paddings=paddings,
        troubles=trouble,
    )


@contextlib.contextmanager
def _as_before(state: Any) -> Iterator[None]:
    snapshot = Snapshot(collect_training_state(state))
    try:
        yield
    finally:
        snapshot.restore()


class _Loop:
    """Drives the step function for one watcher after the other."""

    def __init__(self, step: Callable[[Any], object], batches: Sequence[Any]) -> None:
        self._step, self._batches = step, batches

    def ask(self, watcher: Watcher, loaders: Loaders, kind: type[T]) -> T:
        """What the watcher has seen."""
        told: list[Any] = []
        probe = Probe(watcher, loaders, told=told.append)
        probe.start()
        try:
            for number, batch in enumerate(itertools.cycle(self._batches)):
                if number == 4 and not probe.num_stepped:
                    break
                self._step(batch)
        except Enough:
            pass
        finally:
            probe.stop()
        if not told:
            raise InvalidInput(
                "tune gave 4 batches to the step function, and no optimizer made a step. Give a function "
                "that does all of a training step: forward, backward, `optimizer.step()`."
            )
        assert isinstance(told[0], kind)
        return told[0]
