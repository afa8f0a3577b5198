"""Report of a profile, as text for people and as plain values for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast.train.tuning.findings import Finding, PaddingComparison, TrialResult, format_verdict
from holdfast.train.tuning.measurements import StepMeasurements
from holdfast.train.tuning.source_lines import format_line
from holdfast.train.tuning.verdict import CompileVerdict, Throughput


@dataclasses.dataclass(frozen=True, slots=True)
class TuningReport:
    """Result of a profile.

    As text it has one paragraph per finding. `holdfast tune` also prints tables.
    """

    script: str
    steps: StepMeasurements
    throughput: Throughput
    findings: tuple[Finding, ...]
    """Findings, the most expensive first."""
    verdicts: tuple[CompileVerdict, ...]
    paddings: PaddingComparison | None = None
    batches: tuple[TrialResult, ...] = ()
    workers: tuple[TrialResult, ...] = ()
    unanswered: tuple[str, ...] = ()
    """Questions without an answer, and the reasons."""
    logs: str | None = None
    """Folder with the logs, if they were kept."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        values = dataclasses.asdict(self)
        values["steps"] = {
            key: values["steps"][key] for key in ("device", "optimizer", "learning_rate", "loader", "call")
        }
        for verdict, row in zip(self.verdicts, values["verdicts"], strict=True):
            row["pays"] = verdict.pays
        return values

    def __str__(self) -> str:
        """Return the advice as text."""
        if not self.findings:
            lines = ["Found nothing that would speed it up by more than the noise."]
        else:
            lines = [line for number, one in enumerate(self.findings, 1) for line in _advice(number, one)]
        lines += [f"compile: {format_verdict(one)}" for one in self.verdicts]
        lines += [f"not answered: {reason}" for reason in self.unanswered]
        return "\n".join(lines)


def _advice(number: int, one: Finding) -> list[str]:
    code = f"   {one.place.code}" if one.place is not None and one.place.code else ""
    return [
        f"{number}. {one.kind}: {format_line(one.place)}{code}",
        f"   {one.seen}.",
        f"   Costs: {one.costs}. After the change: {one.after}.",
        f"   {one.change}",
    ]
