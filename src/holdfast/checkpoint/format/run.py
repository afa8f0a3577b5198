"""Small sealed documents of a run: run, claim, rollback, proof of saves, done, refusal, note, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, to_builtins

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
from holdfast.errors import InvalidInput
from holdfast.system.documents import MAX_NUMBER, Count, Fields, read_as, read_members

_T = TypeVar("_T")


RunId = Annotated[str, Meta(pattern=rf"\A{RUN_ID.pattern}\Z")]
AttemptNumber = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
UnixSeconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
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


class Saved(Struct, frozen=True):
    """`attempts/aNNNN-saved.json`: proof of an attempt's first complete checkpoint, that of `step`."""

    run: RunId
    attempt: AttemptNumber
    step: Step


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


class Done(Struct, frozen=True):
    """`done.json`: marker of a finished run, written after everything it saved is durable."""

    run: RunId
    attempt: AttemptNumber
    step: Step
    finished_unix_s: UnixSeconds


class Refusal(Struct, frozen=True):
    """`step-NNNNNNNN/refused-aNNNN.json`: record of a save that is not committed, with its reason."""

    run: RunId
    attempt: AttemptNumber
    step: Step
    reason: Reason
    rank: Annotated[int, Meta(ge=0, le=MAX_RANKS - 1)] | None = None  # the rank that the reason is about
    key: Name | None = None  # the tensor


class SkippedNote(Struct, frozen=True):
    """`step-NNNNNNNN/passed-aNNNN.json`: note that a restore has skipped this checkpoint, which is kept."""

    run: RunId
    attempt: AttemptNumber  # that saved the checkpoint
    step: Step
    reason: Reason
    noted_unix_s: UnixSeconds


class Metrics(Struct, frozen=True):
    """`step-NNNNNNNN/metrics-aNNNN.json`: the metrics of a checkpoint, such as its loss, by name.

    `of_steps` has the step of each value that was recorded for another step than that of the checkpoint, and
    `modes` "min" or "max" for the metric by which the run keeps its best checkpoints.
    """

    run: RunId
    attempt: AttemptNumber
    step: Step
    values: Mapping[str, float]
    of_steps: Mapping[str, Step] = {}
    modes: Mapping[str, Mode] = {}

    def members(self) -> dict[str, Any]:
        """Return its members for JSON, which has no NaN and no infinity."""
        values = {name: encode_metric(value) for name, value in self.values.items()}
        facts = {"of_steps": dict(self.of_steps), "modes": dict(self.modes)}
        given = {name: fact for name, fact in facts.items() if fact}
        return {"run": self.run, "attempt": self.attempt, "step": self.step, "values": values, **given}


def encode_metric(value: float) -> EncodedMetric:
    """Return a metric for JSON: the number, or "nan", "inf" or "-inf"."""
    if abs(value) <= MAX_NUMBER:
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def document(
    value: Run | AttemptClaim | Saved | Emptied | Rollback | Done | Refusal | SkippedNote | Metrics,
) -> bytes:
    """Return the sealed document of a value."""
    members = value.members() if isinstance(value, Metrics) else to_builtins(value)
    return seal(dumps({**VERSIONS[type(value)].header, **members}))


def parse(cls: type[_T], text: bytes, what: str) -> _T:
    """Parse a document into a value of type `cls`."""
    body = unseal(text, what)
    return VERSIONS[cls].parser(body, what)(body)


def _read_metrics(body: Fields) -> Metrics:
    encoded = read_as(dict[str, EncodedMetric], body.value("values"), f"{body.what}: values")
    values = {name: float(value) for name, value in encoded.items()}
    return read_members(Metrics, Fields({**body.members, "values": values}, body.what))


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
    cls: Versions(
        kind, written=1, parsers={1: _read_metrics if cls is Metrics else partial(read_members, cls)}
    )
    for cls, kind in _KINDS.items()
}
