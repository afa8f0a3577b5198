"""A rank's part: which pieces stand where in its data file, the file's chunk hashes, the rank's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.errors import Corrupt, Unsupported
from holdfast.format.hashes import chunk_ranges
from holdfast.format.layout import Piece
from holdfast.format.sealed import dumps, seal, unseal

FORMAT, VERSION = "holdfast-part", 1


@dataclass(frozen=True, slots=True)
class DataFile:
    """Size and chunk hashes of a data file."""

    num_bytes: int
    chunk_bytes: int
    chunks: tuple[str, ...]  # xxh3-128 of each chunk, in order


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote into one checkpoint."""

    run: str
    step: int
    attempt: int
    rank: int
    world_size: int
    base_step: int | None
    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    tied: dict[str, str]
    values: dict[str, Any]  # tagged JSON, see values.decode
    file: DataFile


def pieces_text(pieces: list[Piece], starts: tuple[int, ...]) -> bytes:
    """Canonical JSON of the piece table; costly, so callers keep it with the structure."""
    rows = [
        [p.name, p.dtype, p.shape, p.offsets, p.lengths, start, int(p.per_rank)]
        for p, start in zip(pieces, starts, strict=True)
    ]
    return dumps(rows)


def draft(
    *,
    run: str,
    step: int,
    attempt: int,
    rank: int,
    world_size: int,
    base_step: int | None,
    pieces: bytes,
    tied: dict[str, str],
    values: dict[str, Any],
) -> bytes:
    """A part without its file facts: what the trainer knows when a save is staged.

    Args:
        pieces: as `pieces_text` makes it.
        values: tagged JSON, see `values.encode`.
    """
    facts = dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "run": run,
            "step": step,
            "attempt": attempt,
            "rank": rank,
            "world_size": world_size,
            "base_step": base_step,
            "tied": tied,
            "values": values,
        }
    )
    return facts[:-1] + b',"pieces":' + pieces + b"}"


def finish(draft_text: bytes, file: DataFile) -> bytes:
    """The part document: the draft, the file's facts, sealed."""
    facts = dumps({"bytes": file.num_bytes, "chunk_bytes": file.chunk_bytes, "chunks": "".join(file.chunks)})
    return seal(draft_text[:-1] + b',"file":' + facts + b"}")


def parse(document: bytes, what: str) -> Part:
    """The part in a document.

    Raises:
        Corrupt: its bytes have changed, or it is not a part.
        Unsupported: written by a newer format.
    """
    return build(unseal_part(document, what), what)


def unseal_part(document: bytes, what: str) -> dict[str, Any]:
    """The members of a part's document as JSON gave them.

    Raises:
        Corrupt: its bytes have changed, or it is not a part.
        Unsupported: written by a newer format.
    """
    body = unseal(document, what)
    check_kind(body, FORMAT, VERSION, what)
    return body


def build(body: dict[str, Any], what: str) -> Part:
    """The part with these members.

    Raises:
        Corrupt: a member is missing or is not what it must be.
    """
    try:
        return _parse(body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{what} is sealed but lacks what a part holds: {error!r}.", key=what) from error


def _parse(body: dict[str, Any]) -> Part:
    file, digests = body["file"], body["file"]["chunks"]
    chunks = tuple(digests[i : i + 32] for i in range(0, len(digests), 32))
    num_chunks = sum(1 for _ in chunk_ranges(file["bytes"], file["chunk_bytes"]))
    if len(digests) != 32 * num_chunks:
        raise ValueError(f"{len(digests)} digits of chunk hashes for {num_chunks} chunks")
    return Part(
        run=body["run"],
        step=body["step"],
        attempt=body["attempt"],
        rank=body["rank"],
        world_size=body["world_size"],
        base_step=body["base_step"],
        pieces=tuple(
            Piece(r[0], r[1], tuple(r[2]), tuple(r[3]), tuple(r[4]), bool(r[6])) for r in body["pieces"]
        ),
        starts=tuple(row[5] for row in body["pieces"]),
        tied=body["tied"],
        values=body["values"],
        file=DataFile(file["bytes"], file["chunk_bytes"], chunks),
    )


def check_kind(body: dict[str, Any], kind: str, version: int, what: str) -> None:
    """Refuse a document of another kind or of a newer format.

    Raises:
        Corrupt: another kind of document.
        Unsupported: a newer version.
    """
    if body.get("format") != kind:
        raise Corrupt(f"{what} is a {body.get('format')!r} document, expected {kind!r}.", key=what)
    found = body.get("version")
    if not isinstance(found, int) or found > version:
        message = f"{what} has format version {found}; this Holdfast reads up to {version}. Upgrade it."
        raise Unsupported(message, key=what)
