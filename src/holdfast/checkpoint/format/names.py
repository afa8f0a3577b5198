"""Names of all objects in a home, and parsing of these names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES, MAX_LOG_BYTES, MAX_SMALL_BYTES
from holdfast.errors import Corrupt

RUN = "holdfast.json"  # document with the run's id and the format of the home
DONE = "done.json"  # durable marker of a finished run

# Only names that the functions below write: ASCII digits, leading zeros only up to the fixed width, so that
# no two names mean the same, and numbers within the limits of the format.
_STEP = r"step-(?P<step>[0-9]{8}|[1-9][0-9]{8,14})"
_A = r"a(?P<attempt>[0-9]{4}|[1-9][0-9]{4,8})"
_RANK = r"rank-(?P<rank>[0-9]{5}|[1-9][0-9]{5,6})"
_FORMS = {
    "part": (rf"{_STEP}/{_RANK}-{_A}\.json", MAX_DOCUMENT_BYTES),
    "data": (rf"{_STEP}/{_RANK}-{_A}\.safetensors", None),
    "frozen": (rf"{_STEP}/{_RANK}-{_A}-frozen\.safetensors", None),
    "manifest": (rf"{_STEP}/manifest-{_A}\.json", MAX_DOCUMENT_BYTES),
    "refusal": (rf"{_STEP}/refused-{_A}\.json", MAX_SMALL_BYTES),
    "skipped": (rf"{_STEP}/passed-{_A}\.json", MAX_SMALL_BYTES),
    "metrics": (rf"{_STEP}/metrics-{_A}\.json", MAX_SMALL_BYTES),
    "attempt": (rf"attempts/{_A}\.json", MAX_SMALL_BYTES),
    "emptied": (rf"attempts/{_A}-emptied\.json", MAX_SMALL_BYTES),
    "rollback": (rf"attempts/{_A}-rollback\.json", MAX_SMALL_BYTES),
    "history": (rf"history/{_A}-{_RANK}\.jsonl", MAX_LOG_BYTES),
    "run": (rf"{re.escape(RUN)}|{re.escape(DONE)}", MAX_SMALL_BYTES),
    "step-other": (rf"{_STEP}(?:/(?s:.)*)?", None),
}
"""Form of the names of each kind of object, and the most bytes that one may have."""
_PATTERNS = {kind: re.compile(form) for kind, (form, _) in _FORMS.items()}
_OF_THE_RUN = ("emptied", "rollback", "history", "run")
_NUMBERED = re.compile(
    r"(?:attempts|history|compiled/[^/]+|step-[0-9]{8,})/(?:[^/]*-)?a([0-9]{4,18})[-.][^/]*"
)


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


def attempt_in(name: str) -> int | None:
    """Return the attempt number in the name of any object, or None."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else None


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
    """Parse an object's name; return None for a name outside of this format, and for those of the run."""
    found = _parse(name)
    return None if found is None or found.kind in _OF_THE_RUN else found


def parse_history(name: str) -> tuple[int, int] | None:
    """Return attempt and rank of a log, or None for another name."""
    found = _parse(name)
    return (found.attempt, found.rank) if found is not None and found.kind == "history" else None


def parse_emptied(name: str) -> int | None:
    """Return the attempt number of a record of deletion, or None for another name."""
    found = _parse(name)
    return found.attempt if found is not None and found.kind == "emptied" else None


def parse_rollback(name: str) -> int | None:
    """Return the attempt number of the record of a rollback, or None for another name."""
    found = _parse(name)
    return found.attempt if found is not None and found.kind == "rollback" else None


def check_size(name: str, num_bytes: int) -> None:
    """Raise for a document larger than its kind allows, before it is read."""
    found = _parse(name)
    limit = None if found is None else _FORMS[found.kind][1]
    if limit is not None and num_bytes > limit:
        raise Corrupt(
            f"{name} was not read: it has {num_bytes} bytes; documents of its kind have at most {limit}.",
            key=name,
        )


def _parse(name: str) -> Parsed | None:
    for kind, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(name):
            return Parsed(kind, **{fact: int(number) for fact, number in found.groupdict().items()})
    return None
