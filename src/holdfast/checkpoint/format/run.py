"""Small sealed documents of a run: run, claim, rollback, proof of saves, done, refusal, note, metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from holdfast.checkpoint.format.limits import (
    MAX_ATTEMPT,
    MAX_NAME_CHARS,
    MAX_RANKS,
    MAX_SMALL_BYTES,
    MAX_STEP,
    RUN_ID,
)
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sealed import Versions, dumps, seal, unseal
from holdfast.checkpoint.format.sections import MAX_REASON_CHARS
from holdfast.system.documents import MAX_NUMBER, Bounds, Count, Fields, read_as, read_members, refuse

_T = TypeVar("_T")


def _read_range(value: Any, what: str) -> tuple[int, int]:
    start, end = read_as(tuple[Count, Count], value, what)
    if start > end:
        refuse(what, "it", "the first sample and the end", value)
    return start, end


def read_metric(value: Any, what: str) -> float:
    """Return a metric from JSON, where numbers that are not finite are texts."""
    return float(value) if value in ("nan", "inf", "-inf") else read_as(float, value, what)


RunId = Annotated[str, Bounds(pattern=RUN_ID)]
AttemptNumber = Annotated[int, Bounds(at_most=MAX_ATTEMPT)]
Step = Annotated[int, Bounds(at_most=MAX_STEP)]
WorldSize = Annotated[int, Bounds(at_least=1, at_most=MAX_RANKS)]
UnixSeconds = Annotated[float, Bounds(at_most=math.inf)]
Name = Annotated[str, Bounds(max_len=MAX_NAME_CHARS)]
Reason = Annotated[str, Bounds(max_len=MAX_SMALL_BYTES)]
SampleRange = Annotated[tuple[int, int], _read_range]
Metric = Annotated[float, read_metric]
Mode = Annotated[str, Bounds(pattern=re.compile("min|max"))]

MAX_ROLLBACK_KEYS = 64  # objects that a rollback's record names as skipping, and as kept


@dataclass(frozen=True, slots=True)
class Run:
    """`holdfast.json`: identity of a home's run. `id` is random, made when the home is first used."""

    id: RunId
    created_unix_s: UnixSeconds


@dataclass(frozen=True, slots=True)
class AttemptClaim:
    """`attempts/aNNNN.json`: the claim of an attempt. Only the highest number may commit."""

    number: AttemptNumber
    run: RunId
    world_size: WorldSize
    host: Annotated[str, Bounds(max_len=1024)]
    pid: Count
    started_unix_s: UnixSeconds


@dataclass(frozen=True, slots=True)
class Saved:
    """`attempts/aNNNN-saved.json`: proof of an attempt's first complete checkpoint, that of `step`."""

    run: RunId
    attempt: AttemptNumber
    step: Step


@dataclass(frozen=True, slots=True)
class Emptied:
    """`attempts/aNNNN-emptied.json`: record that all checkpoints up to this attempt were deleted."""

    run: RunId
    attempt: AttemptNumber
    deleted_unix_s: UnixSeconds


@dataclass(frozen=True, slots=True)
class Rollback:
    """`attempts/aNNNN-rollback.json`: record of an attempt that went back behind a spike.

    `skipped` has, for each object of the state that can skip samples, the first one skipped and the end.
    `kept` are the objects that stayed at their position, and cannot skip after another restore.
    """

    run: RunId
    attempt: AttemptNumber  # which ended with it
    base_attempt: AttemptNumber  # of the checkpoint that training went back to
    base_step: Step
    first_step: Step  # of the spike
    last_step: Step  # of the attempt
    in_a_row: Annotated[int, Bounds(at_least=1)]  # rollbacks without progress, with this one
    reason: Annotated[str, Bounds(max_len=MAX_REASON_CHARS)]  # the value that was high
    skipped: Annotated[Mapping[Name, SampleRange], Bounds(max_len=MAX_ROLLBACK_KEYS)]
    kept: Annotated[tuple[Name, ...], Bounds(max_len=MAX_ROLLBACK_KEYS)]
    noted_unix_s: UnixSeconds

    @property
    def base(self) -> CheckpointId:
        """Checkpoint that training went back to."""
        return CheckpointId(attempt=self.base_attempt, step=self.base_step)

    def supersedes(self, checkpoint: CheckpointId) -> bool:
        """Return True for a checkpoint of the stretch that training went back behind."""
        return checkpoint.attempt <= self.attempt and checkpoint > self.base


@dataclass(frozen=True, slots=True)
class Done:
    """`done.json`: marker of a finished run, written after everything it saved is durable."""

    run: RunId
    attempt: AttemptNumber
    step: Step
    finished_unix_s: UnixSeconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """`step-NNNNNNNN/refused-aNNNN.json`: record of a save that is not committed, with its reason."""

    run: RunId
    attempt: AttemptNumber
    step: Step
    reason: Reason
    rank: Annotated[int, Bounds(at_most=MAX_RANKS - 1)] | None = None  # the rank that the reason is about
    key: Name | None = None  # the tensor


@dataclass(frozen=True, slots=True)
class SkippedNote:
    """`step-NNNNNNNN/passed-aNNNN.json`: note that a restore has skipped this checkpoint, which is kept."""

    run: RunId
    attempt: AttemptNumber  # that saved the checkpoint
    step: Step
    reason: Reason
    noted_unix_s: UnixSeconds


@dataclass(frozen=True, slots=True)
class Metrics:
    """`step-NNNNNNNN/metrics-aNNNN.json`: the metrics of a checkpoint, such as its loss, by name.

    `of_steps` has the step of each value that was recorded for another step than that of the checkpoint, and
    `modes` "min" or "max" for the metric by which the run keeps its best checkpoints.
    """

    run: RunId
    attempt: AttemptNumber
    step: Step
    values: Mapping[str, Metric]
    of_steps: Mapping[str, Step] = field(default_factory=dict[str, int])
    modes: Mapping[str, Mode] = field(default_factory=dict[str, str])

    def members(self) -> dict[str, Any]:
        """Return its members for JSON, which has no NaN and no infinity."""
        values = {name: encode_metric(value) for name, value in self.values.items()}
        facts = {"of_steps": dict(self.of_steps), "modes": dict(self.modes)}
        given = {name: fact for name, fact in facts.items() if fact}
        return {"run": self.run, "attempt": self.attempt, "step": self.step, "values": values, **given}


def encode_metric(value: float) -> float | str:
    """Return a metric for JSON: the number, or "nan", "inf" or "-inf"."""
    if abs(value) <= MAX_NUMBER:
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def document(
    value: Run | AttemptClaim | Saved | Emptied | Rollback | Done | Refusal | SkippedNote | Metrics,
) -> bytes:
    """Return the sealed document of a value."""
    members = value.members() if isinstance(value, Metrics) else asdict(value)
    return seal(dumps({**VERSIONS[type(value)].header, **members}))


def parse(cls: type[_T], text: bytes, what: str) -> _T:
    """Parse a document into a value of type `cls`."""
    body = unseal(text, what)
    return VERSIONS[cls].parser(body, what)(body)


_KINDS: dict[type, str] = {
    Run: "holdfast-run",
    AttemptClaim: "holdfast-attempt",
    Saved: "holdfast-saved",
    Emptied: "holdfast-emptied",
    Rollback: "holdfast-rollback",
    Done: "holdfast-done",
    Refusal: "holdfast-refusal",
    SkippedNote: "holdfast-passed",
    Metrics: "holdfast-metrics",
}
VERSIONS: dict[type, Versions[Callable[[Fields], Any]]] = {
    cls: Versions(kind, written=1, parsers={1: partial(read_members, cls)}) for cls, kind in _KINDS.items()
}
