"""The survey of a script: which rehearsals are run, one after the other, and what comes of them all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast import host_memory
from holdfast.errors import InvalidInput
from holdfast.quantity import plural
from holdfast.train.tuning import findings as finding
from holdfast.train.tuning import sizes
from holdfast.train.tuning.facts import Graphs, Race, Steps, Syncs
from holdfast.train.tuning.findings import Finding, Trial
from holdfast.train.tuning.rehearsal import Failed, Plan, Rehearsals, check_script
from holdfast.train.tuning.report import Report
from holdfast.train.tuning.verdict import LEAST_GAIN, Pace, Verdict, judge, pace

QUESTIONS = ("syncs", "compile", "shapes", "batch", "input")
_DOUBLINGS = 5
_LEFT = 0.9  # of the memory that is free: the rest is for what a longer run adds


def survey(
    script: str,
    args: Sequence[str] = (),
    *,
    questions: Collection[str] = QUESTIONS,
    ranks: int | None = None,
    num_steps: int = 10,
    memory_bytes: int | None = None,
    timeout_s: float = 600.0,
    debug: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run a few steps of a training in several ways, and say what would make them quicker.

    Each run is a process of its own, with homes of checkpoints that are thrown away.

    Args:
        script: the Python file that trains.
        args: its arguments.
        questions: which of `QUESTIONS` are asked.
        ranks: processes, as torchrun starts them; None for one plain process.
        num_steps: measured steps in each run.
        memory_bytes: what a batch may need at most; by default what is free.
        timeout_s: limit of each run.
        debug: keep all logs, with torch's own.
        say: is told what is going on.

    Raises:
        InvalidInput: there is no such script, or it does not train.

    Blocks: for as long as the runs take.
    """
    check_script(script)
    with _folder(keep=debug) as folder:
        rehearsals = Rehearsals(folder, ranks=ranks, timeout_s=timeout_s, debug=debug)
        asking = _Survey(rehearsals, Plan("steps", script, tuple(args), num_steps), frozenset(questions), say)
        return asking.report(memory_bytes, logs=str(folder) if debug else None)


@contextlib.contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-tune-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)  # a keeper of the script may still be at work in it


class _Survey:
    """One survey under way."""

    def __init__(
        self, rehearsals: Rehearsals, plan: Plan, questions: frozenset[str], say: Callable[[str], None]
    ) -> None:
        self._rehearsals, self._plan, self._questions, self._say = rehearsals, plan, questions, say
        self._troubles: list[str] = []
        self._findings: list[Finding] = []

    def report(self, memory_bytes: int | None, *, logs: str | None) -> Report:
        self._say("plain steps")
        try:
            steps = self._rehearsals.run(self._plan, Steps)
        except Failed as why:
            raise InvalidInput(
                f"{self._plan.script} could not be measured: {why}\nNothing of it was changed."
            ) from None
        if not steps.steps:
            raise InvalidInput(
                f"{self._plan.script} ends after too few steps to be measured: give it arguments with which "
                f"it takes at least {plural(self._plan.num_steps + 3, 'step')}, or --steps fewer."
            )
        now = pace(steps.steps, steps.device)
        paddings = sizes.compare(steps.lengths) if "shapes" in self._questions else None
        self._findings += sizes.find_padding(steps, paddings)
        self._look_at_code(steps, now)
        verdicts = self._verdicts(steps) if "compile" in self._questions else ()
        self._findings += finding.find_compile(steps, verdicts)
        workers = self._workers(steps, now) if "input" in self._questions else ()
        self._findings += finding.find_input(steps, now, workers)
        batches = self._batches(steps, now, memory_bytes) if "batch" in self._questions else ()
        dearest_first = sorted(self._findings, key=lambda one: -(one.share or 0.0))
        return Report(
            script=self._plan.script,
            steps=steps,
            pace=now,
            findings=tuple(dearest_first),
            verdicts=tuple(verdicts),
            paddings=paddings,
            batches=tuple(batches),
            workers=tuple(workers),
            troubles=tuple(self._troubles),
            logs=logs,
        )

    # -- the questions ---------------------------------------------------------------------------------------

    def _look_at_code(self, steps: Steps, now: Pace) -> None:
        syncs, breaks = [], []
        if "syncs" in self._questions:
            seen = self._ask(
                "looking for host syncs", dataclasses.replace(self._plan, question="syncs"), Syncs
            )
            syncs = [] if seen is None else finding.find_syncs(seen, now.step_s)
        if self._questions & {"syncs", "shapes", "compile"}:
            plan = dataclasses.replace(
                self._plan, question="graphs", compiles_itself=steps.compiled_at is not None
            )
            graphs = self._ask("looking for graph breaks and recompiles", plan, Graphs)
            if graphs is not None:
                if graphs.failure:
                    self._troubles.append(f"graphs: the compiler cannot trace the model: {graphs.failure}")
                breaks = finding.find_breaks(graphs, syncs)
                found = finding.find_recompiles(graphs, len(set(steps.shapes)))
                self._findings += finding.without(found, breaks)
        self._findings += [*breaks, *finding.without(syncs, breaks)]

    def _verdicts(self, steps: Steps) -> list[Verdict]:
        found: list[Verdict] = []
        if steps.compiled_at is not None:
            self._race("own", found)
            # Twice if it seems to be for nothing: two runs differ by more than the steps of one do.
            if found and found[0].is_idle and not found[0].costs:
                self._race("own", found)
        else:
            self._race("whole", found)
        slow = bool(found) and not found[0].pays
        if slow and steps.has_random and steps.device == "cpu":
            self._race("random" if steps.compiled_at is None else "own random", found)
        if slow and steps.compiled_at is None and steps.num_blocks > 1:
            self._race("blocks", found)
        return found

    def _race(self, variant: str, found: list[Verdict]) -> None:
        plan = dataclasses.replace(self._plan, question="race", variant=variant)
        race = self._ask(f"eager against compiled: {finding.NAMES[variant]}", plan, Race)
        if race is not None:
            found.append(judge(race))

    def _workers(self, steps: Steps, now: Pace) -> list[Trial]:
        loader = steps.loader
        if loader is None or loader.index < 0 or loader.is_iterable or now.wait_share < finding.WAITING:
            return []
        numbers = [number for number in (1, 2, 4, 8) if number <= (os.cpu_count() or 1)]
        found = [
            Trial(loader.num_workers, now.step_s, now.items_per_s, now.wait_share, now.noise, now.peak_bytes)
        ]
        for number in numbers:
            if number != loader.num_workers:
                plan = dataclasses.replace(self._plan, loader=loader.index, num_workers=number)
                found.append(self._try(f"{number} loader workers", plan, number, steps.device))
        return found

    def _batches(self, steps: Steps, now: Pace, memory_bytes: int | None) -> list[Trial]:
        loader = steps.loader
        if loader is None or loader.index < 0 or loader.batch_size is None or not now.items_per_s:
            self._troubles.append(
                "batch: no DataLoader with a batch_size feeds the steps; holdfast.fit_batch tries batches "
                "of any kind"
            )
            return []
        size, limit_bytes = loader.batch_size, memory_bytes or _room(steps, now)
        found = [Trial(size, now.step_s, now.items_per_work_s, now.wait_share, now.noise, now.peak_bytes)]
        for doubling in range(1, _DOUBLINGS + 1):
            value = size * 2**doubling
            if not sizes.fits_next(found, value, limit_bytes):
                found.append(dataclasses.replace(found[0], value=value, failure="would not fit into memory"))
                break
            plan = dataclasses.replace(self._plan, loader=loader.index, batch_size=value)
            trial = self._try(f"batches of {value}", plan, value, steps.device, per_work=True)
            found.append(trial)
            if trial.failure or trial.items_per_s < found[-2].items_per_s * (1 + LEAST_GAIN):
                break
        if sizes.find_batch(steps, found[0], found[1:]):
            self._findings += self._confirmed(steps, found)
        return found

    def _confirmed(self, steps: Steps, found: Sequence[Trial]) -> list[Finding]:
        """The finding about the batch, if it holds when both are run once more.

        Two runs of one program differ by more than the steps of one run do, so the best of the batch as it is
        must be worse than the worst of the other.
        """
        loader = steps.loader
        assert loader is not None
        chosen = sizes.choose(found)
        again = []
        for one in (found[0], chosen):
            plan = dataclasses.replace(self._plan, loader=loader.index, batch_size=one.value)
            what = f"batches of {one.value} once more"
            again.append(self._try(what, plan, one.value, steps.device, per_work=True))
        if any(one.failure for one in again):
            return []
        best_now = max(found[0], again[0], key=lambda one: one.items_per_s)
        worst = min(chosen, again[1], key=lambda one: one.items_per_s)
        return sizes.find_batch(steps, best_now, [worst])

    def _try(self, what: str, plan: Plan, value: int, device: str, *, per_work: bool = False) -> Trial:
        self._say(what)
        try:
            steps = self._rehearsals.run(plan, Steps)
        except Failed as why:
            return Trial(value, 0.0, 0.0, 0.0, 0.0, None, str(why).partition("\n")[0])
        if not steps.steps:
            return Trial(value, 0.0, 0.0, 0.0, 0.0, None, "the script ends before it can be measured")
        got = pace(steps.steps, device)
        rate = got.items_per_work_s if per_work else got.items_per_s
        return Trial(value, got.step_s, rate, got.wait_share, got.noise, got.peak_bytes)

    def _ask(self, what: str, plan: Plan, kind: type[Any]) -> Any:
        self._say(what)
        try:
            return self._rehearsals.run(plan, kind)
        except Failed as why:
            self._troubles.append(f"{plan.name}: {why}")
            return None


def _room(steps: Steps, now: Pace) -> int:
    """Bytes that a run may take: on a device it is left to the device to refuse."""
    return (
        int(_LEFT * host_memory.available_bytes()) + (now.peak_bytes or 0) if steps.device == "cpu" else 2**63
    )
