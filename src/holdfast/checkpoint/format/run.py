"""Small sealed documents of a run: run, claim, rollback, proof of saves, done, refusal, note, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

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
from holdfast.system.documents import MAX_NUMBER, Fields, refuse

_T = TypeVar(
    "_T", "Run", "AttemptClaim", "Saved", "Emptied", "Done", "Refusal", "SkippedNote", "Metrics", "Rollback"
)

MAX_ROLLBACK_KEYS = 64
"""Objects that a rollback's record names as skipping, and as kept."""


@dataclass(frozen=True, slots=True)
class Run:
    """`holdfast.json`: identity of a home's run. `id` is random, made when the home is first used."""

    id: str
    created_unix_s: float


@dataclass(frozen=True, slots=True)
class AttemptClaim:
    """`attempts/aNNNN.json`: the claim of an attempt. Only the highest number may commit."""

    number: int
    run: str
    world_size: int
    host: str
    pid: int
    started_unix_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """`attempts/aNNNN-saved.json`: proof of an attempt's first complete checkpoint, that of `step`."""

    run: str
    attempt: int
    step: int


@dataclass(frozen=True, slots=True)
class Emptied:
    """`attempts/aNNNN-emptied.json`: record that all checkpoints up to this attempt were deleted."""

    run: str
    attempt: int
    deleted_unix_s: float


@dataclass(frozen=True, slots=True)
class Rollback:
    """`attempts/aNNNN-rollback.json`: record of an attempt that went back behind a spike.

    Attributes:
        attempt: the attempt, which ended with it.
        base_attempt: attempt of the checkpoint that training went back to.
        base_step: its step.
        first_step: first step of the spike.
        last_step: last step of the attempt.
        in_a_row: rollbacks without progress, with this one.
        reason: the value that was high.
        skipped: for each object of the state that can skip samples, the first one skipped and the end.
        kept: objects of the state that stayed at their position, and cannot skip after another restore.
    """

    run: str
    attempt: int
    base_attempt: int
    base_step: int
    first_step: int
    last_step: int
    in_a_row: int
    reason: str
    skipped: Mapping[str, tuple[int, int]]
    kept: tuple[str, ...]
    noted_unix_s: float

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

    run: str
    attempt: int
    step: int
    finished_unix_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """`step-NNNNNNNN/refused-aNNNN.json`: record of a save that is not committed, with its reason."""

    run: str
    attempt: int
    step: int
    reason: str
    rank: int | None  # the rank that the reason is about
    key: str | None  # the tensor


@dataclass(frozen=True, slots=True)
class SkippedNote:
    """`step-NNNNNNNN/passed-aNNNN.json`: note that a restore has skipped this checkpoint, which is kept."""

    run: str
    attempt: int  # that saved the checkpoint
    step: int
    reason: str
    noted_unix_s: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """`step-NNNNNNNN/metrics-aNNNN.json`: the metrics of a checkpoint, such as its loss.

    Attributes:
        values: by name.
        of_steps: step of each value that was recorded for another step than that of the checkpoint.
        modes: "min" or "max" for the metric by which the run keeps its best checkpoints.
    """

    run: str
    attempt: int
    step: int
    values: Mapping[str, float]
    of_steps: Mapping[str, int] = field(default_factory=dict[str, int])
    modes: Mapping[str, str] = field(default_factory=dict[str, str])

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
    return cls(**VERSIONS[cls].parser(body, what)(body))


def _run(body: Fields) -> dict[str, Any]:
    return {
        "id": body.text("id", pattern=RUN_ID),
        "created_unix_s": body.number("created_unix_s", at_least=0.0),
    }


def _attempt(body: Fields) -> dict[str, Any]:
    return {
        "number": body.integer("number", at_most=MAX_ATTEMPT),
        "run": body.text("run", pattern=RUN_ID),
        "world_size": body.integer("world_size", at_least=1, at_most=MAX_RANKS),
        "host": body.text("host", max_chars=1024),
        "pid": body.integer("pid"),
        "started_unix_s": body.number("started_unix_s", at_least=0.0),
    }


def _saved(body: Fields) -> dict[str, Any]:
    return {
        "run": body.text("run", pattern=RUN_ID),
        "attempt": body.integer("attempt", at_most=MAX_ATTEMPT),
        "step": body.integer("step", at_most=MAX_STEP),
    }


def _done(body: Fields) -> dict[str, Any]:
    return {**_saved(body), "finished_unix_s": body.number("finished_unix_s", at_least=0.0)}


def _emptied(body: Fields) -> dict[str, Any]:
    return {
        "run": body.text("run", pattern=RUN_ID),
        "attempt": body.integer("attempt", at_most=MAX_ATTEMPT),
        "deleted_unix_s": body.number("deleted_unix_s", at_least=0.0),
    }


def _rollback(body: Fields) -> dict[str, Any]:
    ranges = body.fields("skipped")
    if len(ranges.members) > MAX_ROLLBACK_KEYS:
        refuse(body.what, "skipped", f"at most {MAX_ROLLBACK_KEYS} members", ranges.members)
    return {
        "run": body.text("run", pattern=RUN_ID),
        "attempt": body.integer("attempt", at_most=MAX_ATTEMPT),
        "base_attempt": body.integer("base_attempt", at_most=MAX_ATTEMPT),
        "base_step": body.integer("base_step", at_most=MAX_STEP),
        "first_step": body.integer("first_step", at_most=MAX_STEP),
        "last_step": body.integer("last_step", at_most=MAX_STEP),
        "in_a_row": body.integer("in_a_row", at_least=1),
        "reason": body.text("reason", max_chars=MAX_REASON_CHARS),
        "skipped": {key: _range(ranges, key) for key in ranges.members},
        "kept": body.texts("kept", max_items=MAX_ROLLBACK_KEYS, max_chars=MAX_NAME_CHARS),
        "noted_unix_s": body.number("noted_unix_s", at_least=0.0),
    }


def _range(ranges: Fields, key: str) -> tuple[int, int]:
    found = ranges.integers(key, max_items=2)
    if len(found) != 2 or found[0] > found[1] or len(key) > MAX_NAME_CHARS:
        refuse(ranges.what, key[:80], "the first sample and the end", list(found))
    return found[0], found[1]


def _refusal(body: Fields) -> dict[str, Any]:
    return {
        **_saved(body),
        "reason": body.text("reason", max_chars=MAX_SMALL_BYTES),
        "rank": body.integer("rank", at_most=MAX_RANKS - 1) if "rank" in body else None,
        "key": body.text("key", max_chars=MAX_NAME_CHARS) if "key" in body else None,
    }


def _passed(body: Fields) -> dict[str, Any]:
    return {
        **_saved(body),
        "reason": body.text("reason", max_chars=MAX_SMALL_BYTES),
        "noted_unix_s": body.number("noted_unix_s", at_least=0.0),
    }


def _metrics(body: Fields) -> dict[str, Any]:
    values = body.fields("values")
    of_steps, modes = (_optional_fields(body, name) for name in ("of_steps", "modes"))
    return {
        **_saved(body),
        "values": {name: _metric(values, name) for name in values.members},
        "of_steps": {name: of_steps.integer(name, at_most=MAX_STEP) for name in of_steps.members},
        "modes": {name: modes.choice(name, ("min", "max")) for name in modes.members},
    }


def _optional_fields(body: Fields, name: str) -> Fields:
    return body.fields(name) if name in body else Fields({}, body.what)


def _metric(values: Fields, name: str) -> float:
    if isinstance(values.members[name], str):
        return float(values.choice(name, ("nan", "inf", "-inf")))
    return values.number(name)


VERSIONS: dict[type, Versions[Callable[[Fields], dict[str, Any]]]] = {
    Run: Versions("holdfast-run", written=1, parsers={1: _run}),
    AttemptClaim: Versions("holdfast-attempt", written=1, parsers={1: _attempt}),
    Saved: Versions("holdfast-saved", written=1, parsers={1: _saved}),
    Emptied: Versions("holdfast-emptied", written=1, parsers={1: _emptied}),
    Rollback: Versions("holdfast-rollback", written=1, parsers={1: _rollback}),
    Done: Versions("holdfast-done", written=1, parsers={1: _done}),
    Refusal: Versions("holdfast-refusal", written=1, parsers={1: _refusal}),
    SkippedNote: Versions("holdfast-passed", written=1, parsers={1: _passed}),
    Metrics: Versions("holdfast-metrics", written=1, parsers={1: _metrics}),
}
