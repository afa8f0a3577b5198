"""Names of all objects in a home, and parsing of these names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES, MAX_LOG_BYTES, MAX_SMALL_BYTES
from holdfast.errors import Corrupt

RUN = "holdfast.json"
"""Document with the run's id and the format of the home."""
DONE = "done.json"
"""Durable marker of a finished run."""

# Only names that the functions below write: ASCII digits, leading zeros only up to the fixed width, so that
# no two names mean the same, and numbers within the limits of the format.
_STEP = r"step-([0-9]{8}|[1-9][0-9]{8,14})"
_A = r"a([0-9]{4}|[1-9][0-9]{4,8})"
_STEP_DIR = re.compile(_STEP)
_ATTEMPT = re.compile(rf"attempts/{_A}\.json")
_HISTORY = re.compile(rf"history/{_A}-rank-([0-9]{{5}}|[1-9][0-9]{{5,6}})\.jsonl")
_MANIFEST = re.compile(rf"{_STEP}/manifest-{_A}\.json")
_REFUSAL = re.compile(rf"{_STEP}/refused-{_A}\.json")
_SKIPPED = re.compile(rf"{_STEP}/passed-{_A}\.json")
_METRICS = re.compile(rf"{_STEP}/metrics-{_A}\.json")
_RANK_FILE = re.compile(
    rf"{_STEP}/rank-([0-9]{{5}}|[1-9][0-9]{{5,6}})-{_A}(\.json|\.safetensors|-frozen\.safetensors)"
)

_ROLLBACK = re.compile(rf"attempts/{_A}-rollback\.json")
_EMPTIED = re.compile(rf"attempts/{_A}-emptied\.json")
_NUMBERED = re.compile(
    r"(?:attempts|history|compiled/[^/]+|step-[0-9]{8,})/(?:[^/]*-)?a([0-9]{4,18})[-.][^/]*"
)
_LIMITS = {
    "attempt": MAX_SMALL_BYTES,
    "refusal": MAX_SMALL_BYTES,
    "skipped": MAX_SMALL_BYTES,
    "metrics": MAX_SMALL_BYTES,
    "manifest": MAX_DOCUMENT_BYTES,
    "part": MAX_DOCUMENT_BYTES,
}
_KINDS = {".json": "part", ".safetensors": "data", "-frozen.safetensors": "frozen"}


class CheckpointId(NamedTuple):
    """Attempt and step of a checkpoint; the newest of a run is the greatest.

    Give both by name, since the functions below take them in the other order.
    """

    attempt: int
    step: int


class OfCheckpoint:
    """Base of what belongs to one checkpoint, and has its attempt and step as fields."""

    __slots__ = ()

    attempt: int
    step: int

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Attempt and step of the checkpoint."""
        return CheckpointId(attempt=self.attempt, step=self.step)


def step_dir(step: int) -> str:
    """Return `step-00000500`."""
    return f"step-{step:08d}"


def attempt(number: int) -> str:
    """Return the name of an attempt's claim: `attempts/a0003.json`."""
    return f"attempts/a{number:04d}.json"


def first_saved(attempt_number: int) -> str:
    """Return the name of the proof that an attempt had a checkpoint: `attempts/a0003-saved.json`."""
    return f"attempts/a{attempt_number:04d}-saved.json"


def emptied(attempt_number: int) -> str:
    """Return the name of a record of deletion: `attempts/a0003-emptied.json`.

    Every checkpoint up to this attempt was deleted on purpose.
    """
    return f"attempts/a{attempt_number:04d}-emptied.json"


def rollback(attempt_number: int) -> str:
    """Return the name of the record of an attempt that went back: `attempts/a0003-rollback.json`."""
    return f"attempts/a{attempt_number:04d}-rollback.json"


def manifest(step: int, attempt_number: int) -> str:
    """Return `step-00000500/manifest-a0003.json`."""
    return f"{step_dir(step)}/manifest-a{attempt_number:04d}.json"


def refusal(step: int, attempt_number: int) -> str:
    """Return `step-00000500/refused-a0003.json`."""
    return f"{step_dir(step)}/refused-a{attempt_number:04d}.json"


def skipped(step: int, attempt_number: int) -> str:
    """Return `step-00000500/passed-a0003.json`."""
    return f"{step_dir(step)}/passed-a{attempt_number:04d}.json"


def metrics(step: int, attempt_number: int) -> str:
    """Return `step-00000500/metrics-a0003.json`."""
    return f"{step_dir(step)}/metrics-a{attempt_number:04d}.json"


def data(step: int, attempt_number: int, rank: int) -> str:
    """Return `step-00000500/rank-00001-a0003.safetensors`."""
    return f"{step_dir(step)}/rank-{rank:05d}-a{attempt_number:04d}.safetensors"


def frozen(step: int, attempt_number: int, rank: int) -> str:
    """Return `step-00000500/rank-00001-a0003-frozen.safetensors`."""
    return f"{step_dir(step)}/rank-{rank:05d}-a{attempt_number:04d}-frozen.safetensors"


def part(step: int, attempt_number: int, rank: int) -> str:
    """Return `step-00000500/rank-00001-a0003.json`."""
    return f"{step_dir(step)}/rank-{rank:05d}-a{attempt_number:04d}.json"


def history(attempt_number: int, rank: int) -> str:
    """Return `history/a0003-rank-00001.jsonl`."""
    return f"history/a{attempt_number:04d}-rank-{rank:05d}.jsonl"


def parse_history(name: str) -> tuple[int, int] | None:
    """Return attempt and rank of a log, or None for another name."""
    found = _HISTORY.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def attempt_in(name: str) -> int | None:
    """Return the attempt number in the name of any object, or None."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else None


def parse_emptied(name: str) -> int | None:
    """Return the attempt number of a record of deletion, or None for another name."""
    found = _EMPTIED.fullmatch(name)
    return int(found[1]) if found else None


def parse_rollback(name: str) -> int | None:
    """Return the attempt number of the record of a rollback, or None for another name."""
    found = _ROLLBACK.fullmatch(name)
    return int(found[1]) if found else None


def check_size(name: str, num_bytes: int) -> None:
    """Raise for a document larger than its kind allows, before it is read."""
    limit = _limit_of(name)
    if limit is not None and num_bytes > limit:
        raise Corrupt(
            f"{name} was not read: it has {num_bytes} bytes; documents of its kind have at most {limit}.",
            key=name,
        )


def _limit_of(name: str) -> int | None:
    if name in (RUN, DONE) or parse_emptied(name) is not None or parse_rollback(name) is not None:
        return MAX_SMALL_BYTES
    if parse_history(name):
        return MAX_LOG_BYTES
    facts = parse(name)
    return None if facts is None else _LIMITS.get(facts.kind)


@dataclass(frozen=True, slots=True)
class Parsed(OfCheckpoint):
    """Facts in an object's name.

    `kind` is one of: attempt, manifest, part, data, frozen, refusal, skipped, metrics, step-other.
    """

    kind: str
    step: int = -1
    attempt: int = -1
    rank: int = -1


def parse(name: str) -> Parsed | None:
    """Parse an object's name; return None for a name outside of this format."""
    if found := _MANIFEST.fullmatch(name):
        return Parsed("manifest", step=int(found[1]), attempt=int(found[2]))
    if found := _RANK_FILE.fullmatch(name):
        return Parsed(_KINDS[found[4]], step=int(found[1]), rank=int(found[2]), attempt=int(found[3]))
    if found := _REFUSAL.fullmatch(name):
        return Parsed("refusal", step=int(found[1]), attempt=int(found[2]))
    if found := _SKIPPED.fullmatch(name):
        return Parsed("skipped", step=int(found[1]), attempt=int(found[2]))
    if found := _METRICS.fullmatch(name):
        return Parsed("metrics", step=int(found[1]), attempt=int(found[2]))
    if found := _ATTEMPT.fullmatch(name):
        return Parsed("attempt", attempt=int(found[1]))
    if found := _STEP_DIR.fullmatch(name.partition("/")[0]):
        return Parsed("step-other", step=int(found[1]))
    return None
