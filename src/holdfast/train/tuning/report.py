"""What a survey of a training has found, whole: for people, and as plain values for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast.train.tuning.facts import Steps
from holdfast.train.tuning.findings import Finding, Trial, say_verdict
from holdfast.train.tuning.places import say_place
from holdfast.train.tuning.sizes import Paddings
from holdfast.train.tuning.verdict import Pace, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a survey has found.

    As text it is one paragraph for each finding; `holdfast tune` prints tables besides.
    """

    script: str
    steps: Steps
    pace: Pace
    findings: tuple[Finding, ...]
    """The dearest first."""
    verdicts: tuple[Verdict, ...]
    paddings: Paddings | None = None
    batches: tuple[Trial, ...] = ()
    workers: tuple[Trial, ...] = ()
    troubles: tuple[str, ...] = ()
    """Questions that could not be answered, and why."""
    logs: str | None = None
    """Folder with the logs, if they were kept."""

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        told = dataclasses.asdict(self)
        told["steps"] = {
            key: told["steps"][key] for key in ("device", "optimizer", "learning_rate", "loader", "call")
        }
        for verdict, row in zip(self.verdicts, told["verdicts"], strict=True):
            row["pays"] = verdict.pays
        return told

    def __str__(self) -> str:
        """The advice, for people."""
        if not self.findings:
            lines = ["Nothing was found that would make it quicker by more than the noise."]
        else:
            lines = [line for number, one in enumerate(self.findings, 1) for line in _advice(number, one)]
        lines += [f"compile: {say_verdict(one)}" for one in self.verdicts]
        lines += [f"not answered: {trouble}" for trouble in self.troubles]
        return "\n".join(lines)


def _advice(number: int, one: Finding) -> list[str]:
    code = f"   {one.place.code}" if one.place is not None and one.place.code else ""
    return [
        f"{number}. {one.kind}: {say_place(one.place)}{code}",
        f"   {one.seen}.",
        f"   Costs: {one.costs}. After the change: {one.after}.",
        f"   {one.change}",
    ]
