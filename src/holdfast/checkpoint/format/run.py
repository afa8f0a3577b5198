"""Small sealed documents of a run: run, claim, rollback, proof of saves, done, refusal, note, metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from holdfast.checkpoint.format.limits import (
    MAX_SMALL_BYTES,
    AttemptNumber,
    Name,
    Rank,
    RunId,
    Step,
    UnixSeconds,
    WorldSize,
)
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sealed import Versions, seal
from holdfast.checkpoint.format.sections import MAX_REASON_CHARS
from holdfast.errors import InvalidInput
from holdfast.system.documents import MAX_NUMBER, Count, to_plain

_T = TypeVar("_T")


Reason = Annotated[str, Meta(max_length=MAX_SMALL_BYTES)]
Mode = Annotated[str, Meta(pattern=r"\A(min|max)\Z")]
EncodedMetric = float | Literal["nan", "inf", "-inf"]  # JSON has no such numbers

MAX_ROLLBACK_KEYS = 64  # objects that a rollback's record names as skipping, and as kept


class Run(Struct, frozen=True):
    """`holdfast.json`: identity of a home's run. `id` is random, made when the home is first used."""

    id: RunId
    created_unix_s: UnixSeconds


class AttemptClaim(Struct, frozen=True):
    """`attempts/aNNNN.json`: the claim of an attempt. Only the highest number may commit."""

    number: AttemptNumber
    run: RunId
    world_size: WorldSize
    host: Annotated[str, Meta(max_length=1024)]
    pid: Count
    started_unix_s: UnixSeconds


class _StepRecord(Struct, frozen=True):
    """Members of a record about a checkpoint: its run, the attempt that saved it, and its step."""

    run: RunId
    attempt: AttemptNumber
    step: Step


class Saved(_StepRecord, frozen=True):
    """`attempts/aNNNN-saved.json`: proof of an attempt's first complete checkpoint, that of `step`."""


class Emptied(Struct, frozen=True):
    """`attempts/aNNNN-emptied.json`: record that all checkpoints up to this attempt were deleted."""

    run: RunId
    attempt: AttemptNumber
    deleted_unix_s: UnixSeconds


class Rollback(Struct, frozen=True):
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
    in_a_row: Annotated[int, Meta(ge=1)]  # rollbacks without progress, with this one
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]  # the value that was high
    skipped: Annotated[Mapping[Name, tuple[Count, Count]], Meta(max_length=MAX_ROLLBACK_KEYS)]
    kept: Annotated[tuple[Name, ...], Meta(max_length=MAX_ROLLBACK_KEYS)]
    noted_unix_s: UnixSeconds

    def __post_init__(self) -> None:
        for name, (start, end) in self.skipped.items():
            if start > end:
                raise InvalidInput(f"the samples of {name} end at {end}, before the first, {start}")

    @property
    def base(self) -> CheckpointId:
        """Checkpoint that training went back to."""
        return CheckpointId(attempt=self.base_attempt, step=self.base_step)

    def supersedes(self, checkpoint: CheckpointId) -> bool:
        """Return True for a checkpoint of the stretch that training went back behind."""
        return checkpoint.attempt <= self.attempt and checkpoint > self.base


class Done(_StepRecord, frozen=True):
    """`done.json`: marker of a finished run, written after everything it saved is durable."""

    finished_unix_s: UnixSeconds


class Refusal(_StepRecord, frozen=True):
    """`step-NNNNNNNN/refused-aNNNN.json`: record of a save that is not committed, with its reason."""

    reason: Reason
    rank: Rank | None = None  # the rank that the reason is about
    key: Name | None = None  # the tensor


class SkippedNote(_StepRecord, frozen=True):
    """`step-NNNNNNNN/passed-aNNNN.json`: note that a restore has skipped this checkpoint, which is kept."""

    reason: Reason
    noted_unix_s: UnixSeconds


class Metrics(_StepRecord, frozen=True):
    """`step-NNNNNNNN/metrics-aNNNN.json`: the metrics of a checkpoint, such as its loss, by name.

    `of_steps` has the step of each value that was recorded for another step than that of the checkpoint, and
    `modes` "min" or "max" for the metric by which the run keeps its best checkpoints.
    """

    values: Mapping[str, float]
    of_steps: Mapping[str, Step] = {}
    modes: Mapping[str, Mode] = {}


class _MetricsMembers(Metrics, frozen=True, omit_defaults=True):
    """Members of the document of `Metrics`: JSON has no NaN and no infinity."""

    values: Mapping[str, EncodedMetric]  # pyright: ignore[reportIncompatibleVariableOverride]


def encode_metric(value: float) -> EncodedMetric:
    """Return a metric for JSON: the number, or "nan", "inf" or "-inf"."""
    if abs(value) <= MAX_NUMBER:
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def document(
    value: Run | AttemptClaim | Saved | Emptied | Rollback | Done | Refusal | SkippedNote | Metrics,
) -> bytes:
    """Return the sealed document of a value."""
    members: Struct = value
    if isinstance(value, Metrics):
        values: dict[str, EncodedMetric] = {key: encode_metric(one) for key, one in value.values.items()}
        others = dict(value.of_steps), dict(value.modes)
        members = _MetricsMembers(value.run, value.attempt, value.step, values, *others)
    return seal(VERSIONS[type(value)].line(to_plain(members)))


def parse(cls: type[_T], text: bytes, what: str) -> _T:
    """Parse a document into a value of type `cls`."""
    members = VERSIONS[cls].unseal(text, what)
    if isinstance(members, _MetricsMembers):
        values = {name: float(metric) for name, metric in members.values.items()}
        return cls(**(asdict(members) | {"values": values}))
    return members


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
VERSIONS: dict[type, Versions[Any]] = {
    cls: Versions(kind, written=1, types={1: _MetricsMembers if cls is Metrics else cls})
    for cls, kind in _KINDS.items()
}
