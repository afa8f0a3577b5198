"""The small sealed documents of a run: the run, an attempt's claim, the done marker, a refusal, a note."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from holdfast.errors import Corrupt
from holdfast.format.part import check_kind
from holdfast.format.sealed import dumps, seal, unseal

VERSION = 1
_T = TypeVar("_T", "Run", "Attempt", "Done", "Refusal", "Passed")


@dataclass(frozen=True, slots=True)
class Run:
    """`holdfast.json`: which run a home holds. `id` is random, made when the home is first used."""

    id: str
    created_unix_s: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """`attempts/aNNNN.json`: the claim of an attempt; the highest number is the one that may commit."""

    number: int
    run: str
    world_size: int
    host: str
    pid: int
    started_unix_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """`done.json`: the run has finished; written when everything it saved is durable."""

    run: str
    attempt: int
    step: int
    finished_unix_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """`step-NNNNNNNN/refused-aNNNN.json`: the parts of a save do not fit together; it is not committed."""

    run: str
    attempt: int
    step: int
    reason: str
    rank: int | None  # the rank that the reason is about
    key: str | None  # the tensor


@dataclass(frozen=True, slots=True)
class Passed:
    """`step-NNNNNNNN/passed-aNNNN.json`: a restore has passed this checkpoint over; it is kept."""

    run: str
    attempt: int  # that saved the checkpoint
    step: int
    reason: str
    noted_unix_s: float


def document(value: Run | Attempt | Done | Refusal | Passed) -> bytes:
    """The sealed document of a value."""
    return seal(dumps({"format": _kind(type(value)), "version": VERSION, **asdict(value)}))


def parse(cls: type[_T], text: bytes, what: str) -> _T:
    """The value of type `cls` in a document.

    Raises:
        Corrupt: its bytes have changed, or it is another kind of document.
        Unsupported: written by a newer format.
    """
    body: dict[str, Any] = unseal(text, what)
    check_kind(body, _kind(cls), VERSION, what)
    try:
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})
    except KeyError as error:
        raise Corrupt(f"{what} is sealed but lacks {error}.", key=what) from error


def _kind(cls: type) -> str:
    return f"holdfast-{cls.__name__.lower()}"
