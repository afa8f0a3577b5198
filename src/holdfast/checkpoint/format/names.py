"""Names of all objects in a home, and parsing of these names."""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from holdfast.checkpoint.format.limits import (
    MAX_DOCUMENT_BYTES,
    MAX_LOG_BYTES,
    MAX_SMALL_BYTES,
    AttemptNumber,
    Step,
)
from holdfast.errors import Corrupt

RUN = "holdfast.json"  # document with the run's id and the format of the home
DONE = "done.json"  # durable marker of a finished run

# Only names that `_of_step` writes are parsed: ASCII digits, leading zeros only up to the fixed width, so
# that no two names mean the same, and numbers within the limits of the format.
_NUMBERS = {
    "step": r"step-(?P<step>[0-9]{8}|[1-9][0-9]{8,14})",
    "attempt": r"a(?P<attempt>[0-9]{4}|[1-9][0-9]{4,8})",
    "rank": r"rank-(?P<rank>[0-9]{5}|[1-9][0-9]{5,6})",
}
_FORMS: dict[str, tuple[str, int | None]] = {
    "part": ("{step}/{rank}-{attempt}.json", MAX_DOCUMENT_BYTES),
    "data": ("{step}/{rank}-{attempt}.safetensors", None),
    "frozen": ("{step}/{rank}-{attempt}-frozen.safetensors", None),
    "manifest": ("{step}/manifest-{attempt}.json", MAX_DOCUMENT_BYTES),
    "refusal": ("{step}/refused-{attempt}.json", MAX_SMALL_BYTES),
    "skipped": ("{step}/passed-{attempt}.json", MAX_SMALL_BYTES),
    "metrics": ("{step}/metrics-{attempt}.json", MAX_SMALL_BYTES),
    "attempt": ("attempts/{attempt}.json", MAX_SMALL_BYTES),
    "saved": ("attempts/{attempt}-saved.json", MAX_SMALL_BYTES),
    "emptied": ("attempts/{attempt}-emptied.json", MAX_SMALL_BYTES),
    "rollback": ("attempts/{attempt}-rollback.json", MAX_SMALL_BYTES),
    "history": ("history/{attempt}-{rank}.jsonl", MAX_LOG_BYTES),
    "base": ("bases/{rank}-{attempt}-{step}.safetensors", None),
    "run": (f"{RUN}|{DONE}", MAX_SMALL_BYTES),
}
"""Form of the names of each kind of object, and the most bytes that one may have."""
_PATTERNS = {
    **{kind: re.compile(form.replace(".", r"\.").format(**_NUMBERS)) for kind, (form, _) in _FORMS.items()},
    "step-other": re.compile(_NUMBERS["step"] + r"(?:/(?s:.)*)?"),  # the last, as it also matches the others
}
_OF_THE_RUN = ("saved", "emptied", "rollback", "history", "base", "run")
_NUMBERED = re.compile(
    r"(?:attempts|history|compiled/[^/]+|step-[0-9]{8,})/(?:[^/]*-)?a([0-9]{4,18})[-.][^/]*"
)


class CheckpointId(NamedTuple):
    """Attempt and step of a checkpoint; the newest of a run is the greatest.

    Give both by name, since the functions below take them in the other order.
    """

    attempt: AttemptNumber
    step: Step


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


def _of_step(kind: str, step: int, attempt_number: int, rank: int = 0) -> str:
    """Return the name of an object of one kind."""
    numbers = {"step": step_dir(step), "attempt": f"a{attempt_number:04d}", "rank": f"rank-{rank:05d}"}
    return _FORMS[kind][0].format(**numbers)


def _of_attempt(kind: str, attempt_number: int, rank: int = 0) -> str:
    return _of_step(kind, 0, attempt_number, rank)


# Of step and attempt, and those of a rank also of its number:
manifest = partial(_of_step, "manifest")  # step-00000500/manifest-a0003.json
refusal = partial(_of_step, "refusal")  # step-00000500/refused-a0003.json
skipped = partial(_of_step, "skipped")  # step-00000500/passed-a0003.json
metrics = partial(_of_step, "metrics")  # step-00000500/metrics-a0003.json
part = partial(_of_step, "part")  # step-00000500/rank-00001-a0003.json
data = partial(_of_step, "data")  # step-00000500/rank-00001-a0003.safetensors
frozen = partial(_of_step, "frozen")  # step-00000500/rank-00001-a0003-frozen.safetensors
base = partial(_of_step, "base")  # bases/rank-00001-a0003-step-00000500.safetensors
# Of an attempt:
attempt = partial(_of_attempt, "attempt")  # attempts/a0003.json, its claim
first_saved = partial(_of_attempt, "saved")  # attempts/a0003-saved.json, the proof that it had a checkpoint
emptied = partial(_of_attempt, "emptied")  # attempts/a0003-emptied.json, of deletions on purpose up to it
rollback = partial(_of_attempt, "rollback")  # attempts/a0003-rollback.json, if it went back
history = partial(_of_attempt, "history")  # history/a0003-rank-00001.jsonl


def attempt_in(name: str) -> int | None:
    """Return the attempt number in the name of any object, or None."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else None


class Parsed(OfCheckpoint, Struct, frozen=True):
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


def parse_record(kind: str, name: str) -> Parsed | None:
    """Return the facts in the name of a record of the run, such as "history"; None for another name."""
    found = _parse(name)
    return found if found is not None and found.kind == kind else None


def check_size(name: str, num_bytes: int) -> None:
    """Raise for a document larger than its kind allows, before it is read."""
    found = _parse(name)
    limit = None if found is None else _FORMS.get(found.kind, ("", None))[1]
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
