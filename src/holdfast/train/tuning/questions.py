"""Questions about a training, each answered by a run of some steps, and the report on the answers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import InvalidInput
from holdfast.system.units import plural
from holdfast.train.tuning import findings
from holdfast.train.tuning.findings import Finding, TuningReport
from holdfast.train.tuning.loaders import LoaderSettings
from holdfast.train.tuning.measurements import (
    NAMES,
    CompileMeasurements,
    CompileVerdict,
    GraphMeasurements,
    StepMeasurements,
    SyncMeasurements,
    judge_compile,
    measure_throughput,
)

KINDS = {
    "steps": StepMeasurements,
    "syncs": SyncMeasurements,
    "graphs": GraphMeasurements,
    "race": CompileMeasurements,
}
"""Class of the measurements of each kind of run."""


class RunSpec(Struct, frozen=True):
    """Specification of a run."""

    question: str  # a key of `KINDS`
    script: str
    args: tuple[str, ...]
    num_steps: int
    variant: str = ""  # the way to compile, in a comparison of compiled and eager steps
    compiles_itself: bool = False
    loader: LoaderSettings | None = None  # the data loader whose settings are changed

    @property
    def name(self) -> str:
        """A short name for files and messages."""
        loader = self.loader or LoaderSettings(-1)
        changed = {"workers": loader.num_workers, "batch": loader.batch_size}
        settings = (f"{name}-{value}" for name, value in changed.items() if value is not None)
        return "-".join(filter(None, (self.question, self.variant, *settings))).replace(" ", "-")


class RunFailed(Exception):
    """A run without a result. The message has the reason and the end of the script's output."""


class Profile:
    """A profile in progress: the steps as they are, then an answer to each question.

    `measure` runs some steps as a specification has it, and returns their measurements, of the class in
    `KINDS`. It raises RunFailed without a result.
    """

    def __init__(
        self,
        measure: Callable[[RunSpec], Any],
        spec: RunSpec,
        questions: Collection[str],
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.measure, self.spec, self.questions, self.on_progress = measure, spec, questions, on_progress
        self.unanswered: list[str] = []
        self.findings: list[Finding] = []
        self.verdicts: list[CompileVerdict] = []
        on_progress("plain steps")
        try:
            self.steps: StepMeasurements = measure(spec)
        except RunFailed as why:
            raise InvalidInput(
                f"{spec.script} could not be measured: {why}\nThe script was not modified."
            ) from None
        if not self.steps.steps:
            raise InvalidInput(
                f"{spec.script} ends after too few steps. Pass arguments with which it takes at least "
                f"{plural(spec.num_steps + 3, 'step')}, or a smaller --steps."
            )
        self.now = measure_throughput(self.steps.steps, self.steps.device)
        self.paddings = findings.compare_lengths(self.steps.lengths) if "shapes" in questions else None
        self.findings += findings.find_padding(self.steps, self.paddings)
        self._find_in_code()

    def _find_in_code(self) -> None:
        syncs, breaks = [], []
        if "syncs" in self.questions:
            seen = self.ask("looking for host syncs", question="syncs")
            syncs = [] if seen is None else findings.find_syncs(seen, self.now.step_s)
        if {"syncs", "shapes", "compile"} & set(self.questions):
            what, is_own = "looking for graph breaks and recompiles", self.steps.compiled_at is not None
            graphs = self.ask(what, question="graphs", compiles_itself=is_own)
            if graphs is not None:
                if graphs.failure:
                    self.unanswered.append(f"graphs: the compiler cannot trace the model: {graphs.failure}")
                breaks = findings.find_breaks(graphs, syncs)
                found = findings.find_recompiles(graphs, len(set(self.steps.shapes)))
                self.findings += findings.exclude_lines(found, breaks)
        self.findings += [*breaks, *findings.exclude_lines(syncs, breaks)]

    def race(self, variant: str) -> None:
        """Compare eager steps with those of one way to compile."""
        what = f"eager against compiled: {NAMES[variant]}"
        if measured := self.ask(what, question="race", variant=variant):
            self.verdicts.append(judge_compile(measured))

    def ask(self, what: str, **changes: Any) -> Any:
        """Return the measurements of a run with a changed specification; None if it has failed."""
        self.on_progress(what)
        spec = replace(self.spec, **changes)
        try:
            return self.measure(spec)
        except RunFailed as why:
            self.unanswered.append(f"{spec.name}: {why}")
            return None

    def report(self, **more: Any) -> TuningReport:
        """Return the report on everything that was found."""
        return TuningReport(
            script=self.spec.script,
            steps=self.steps,
            throughput=self.now,
            findings=tuple(sorted(self.findings, key=lambda finding: -(finding.share or 0.0))),
            verdicts=tuple(self.verdicts),
            paddings=self.paddings,
            unanswered=tuple(self.unanswered),
            **more,
        )
