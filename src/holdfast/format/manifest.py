"""The manifest: the commit record of a checkpoint, made from all its parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Corrupt, InvalidInput
from holdfast.format.hashes import digest
from holdfast.format.layout import Piece
from holdfast.format.part import Part, build, check_kind, unseal_part
from holdfast.format.sealed import dumps, seal, unseal

FORMAT, VERSION = "holdfast-manifest", 1
EACH, SPLIT = "each", "split"
"""Owners that are no rank: every rank has its own / several ranks hold regions, see their parts."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint. `owner` is the rank that wrote all of it, `EACH` or `SPLIT`."""

    dtype: str
    shape: tuple[int, ...]
    owner: int | str


@dataclass(frozen=True, slots=True)
class PartFile:
    """What the manifest knows of a rank's two files."""

    rank: int
    part_bytes: int
    part_xxh3: str
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint."""

    id: str  # random; tells one's own commit from another's after an unclear answer
    run: str
    step: int
    attempt: int
    world_size: int
    base_step: int | None  # step that the writing attempt was restored from
    created_unix_s: float  # for people; never used to order checkpoints
    parts: tuple[PartFile, ...]
    tensors: dict[str, Tensor]
    tied: dict[str, str]

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(part.data_bytes for part in self.parts)


def merge(parts: Sequence[tuple[Part, bytes]], *, id: str, created_unix_s: float) -> Manifest:
    """The manifest of a checkpoint from all its parts, each with its document's bytes.

    Raises:
        InvalidInput: the parts do not belong together, or do not cover each tensor exactly once.
    """
    first = parts[0][0]
    if [part.rank for part, _ in parts] != list(range(first.world_size)):
        found = [part.rank for part, _ in parts]
        message = f"Step {first.step} needs the parts of ranks 0 to {first.world_size - 1}, found {found}."
        raise InvalidInput(message, step=first.step)
    by_name: dict[str, list[tuple[int, Piece]]] = {}
    tied: dict[str, str] = {}
    for part, _ in parts:
        _check_same_checkpoint(part, first)
        tied.update(part.tied)
        for piece in part.pieces:
            by_name.setdefault(piece.name, []).append((part.rank, piece))
    return Manifest(
        id=id,
        run=first.run,
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        base_step=first.base_step,
        created_unix_s=created_unix_s,
        parts=tuple(PartFile(part.rank, len(doc), digest(doc), part.file.num_bytes) for part, doc in parts),
        tensors={name: _tensor(name, pieces, first.step) for name, pieces in by_name.items()},
        tied=tied,
    )


def merge_documents(documents: Sequence[tuple[str, bytes]], *, id: str, created_unix_s: float) -> Manifest:
    """`merge` for documents as they lie in the store, each with its name.

    Does without an object per piece where every tensor is whole in one part, which is most of the time: a
    keeper does this after every save.

    Raises:
        Corrupt: a part is damaged.
        InvalidInput: as `merge`.
    """
    bodies = [unseal_part(text, name) for name, text in documents]
    full = [build({**body, "pieces": []}, name) for body, (name, _) in zip(bodies, documents, strict=True)]
    manifest = merge(
        [(part, text) for part, (_, text) in zip(full, documents, strict=True)],
        id=id,
        created_unix_s=created_unix_s,
    )
    tensors = _whole_tensors(bodies)
    if tensors is not None:
        return dataclasses.replace(manifest, tensors=tensors)
    parts = [(build(body, name), text) for body, (name, text) in zip(bodies, documents, strict=True)]
    return merge(parts, id=id, created_unix_s=created_unix_s)


def _whole_tensors(bodies: Sequence[dict[str, Any]]) -> dict[str, Tensor] | None:
    """The tensors of a checkpoint in which no tensor is in pieces; None if one is, or if ranks disagree."""
    tensors: dict[str, Tensor] = {}
    for body in bodies:
        rank = body["rank"]
        for name, dtype, shape, offsets, lengths, _, per_rank in body["pieces"]:
            known = tensors.get(name)
            if known is not None and (not per_rank or known.owner != EACH):
                return None
            if lengths != shape or any(offsets):
                return None
            if known is None:
                tensors[name] = Tensor(dtype, tuple(shape), EACH if per_rank else rank)
    return tensors


def _check_same_checkpoint(part: Part, first: Part) -> None:
    for fact in ("run", "step", "attempt", "world_size", "base_step"):
        if getattr(part, fact) != getattr(first, fact):
            raise InvalidInput(
                f"Rank {part.rank} says {fact}={getattr(part, fact)!r} for step {first.step}, "
                f"rank {first.rank} says {getattr(first, fact)!r}: their parts do not belong "
                "to one checkpoint. It was not committed.",
                step=first.step,
                rank=part.rank,
            )


def _tensor(name: str, pieces: list[tuple[int, Piece]], step: int) -> Tensor:
    first_rank, first = pieces[0]
    for rank, piece in pieces:
        _check_piece(piece, rank, first, first_rank, step)
    if first.per_rank:
        return Tensor(first.dtype, first.shape, EACH)
    for rank, piece in pieces:
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            raise InvalidInput(
                f"Ranks disagree about {name}: rank {first_rank} has {first.dtype}{list(first.shape)}, rank "
                f"{rank} has {piece.dtype}{list(piece.shape)}. Step {step} was not committed.",
                step=step,
                rank=rank,
                key=name,
            )
    if len(pieces) == 1 and first.is_whole:
        return Tensor(first.dtype, first.shape, first_rank)
    _check_coverage(name, pieces, step)
    return Tensor(first.dtype, first.shape, SPLIT)


def _check_piece(piece: Piece, rank: int, first: Piece, first_rank: int, step: int) -> None:
    name = piece.name
    if piece.per_rank != first.per_rank:
        own, shared = (rank, first_rank) if piece.per_rank else (first_rank, rank)
        message = (
            f"Ranks disagree about {name}: for rank {own} every rank has its own, for rank {shared} all "
            f"share it. Step {step} was not committed."
        )
        raise InvalidInput(message, step=step, rank=rank, key=name)
    same_dims = len(piece.shape) == len(piece.offsets) == len(piece.lengths)
    sides = zip(piece.offsets, piece.lengths, piece.shape, strict=False)
    if not same_dims or any(start < 0 or n < 0 or start + n > size for start, n, size in sides):
        message = (
            f"Rank {rank} holds a region of {name} that is not inside it: offsets {list(piece.offsets)}, "
            f"lengths {list(piece.lengths)}, shape {list(piece.shape)}. Step {step} was not committed."
        )
        raise InvalidInput(message, step=step, rank=rank, key=name)


def _check_coverage(name: str, pieces: list[tuple[int, Piece]], step: int) -> None:
    """Inside the shape, without overlap, and as many elements as the shape has: then nothing is missing."""
    shape = pieces[0][1].shape
    held = [(rank, piece) for rank, piece in pieces if piece.num_bytes]
    if clash := _find_overlap(held):
        (rank_a, a), (rank_b, _) = clash
        message = (
            f"Ranks {rank_b} and {rank_a} both hold the region at {list(a.offsets)} of {name}. "
            f"Step {step} was not committed."
        )
        raise InvalidInput(message, step=step, rank=rank_a, key=name)
    covered = sum(math.prod(piece.lengths) for _, piece in held)
    if covered != math.prod(shape):
        message = (
            f"The pieces of {name} cover {covered} of its {math.prod(shape)} elements (shape {list(shape)}). "
            f"Step {step} was not committed."
        )
        raise InvalidInput(message, step=step, key=name)


def _find_overlap(held: list[tuple[int, Piece]]) -> tuple[tuple[int, Piece], tuple[int, Piece]] | None:
    """Two pieces that overlap, if any.

    Sweeps along the dimension that is cut most often, and compares a piece only with those that reach its
    start: n * log n steps for n pieces under the usual shardings, where comparing all pairs of a thousand
    ranks would take minutes.
    """
    dims = range(len(held[0][1].shape)) if held else range(0)
    dim = max(dims, key=lambda d: len({piece.offsets[d] for _, piece in held}), default=None)
    if dim is None:  # no dimension: every piece is the one element
        return (held[1], held[0]) if len(held) > 1 else None
    reaching: list[tuple[int, Piece]] = []
    for rank, piece in sorted(held, key=lambda item: item[1].offsets[dim]):
        start = piece.offsets[dim]
        reaching = [other for other in reaching if other[1].offsets[dim] + other[1].lengths[dim] > start]
        for other in reaching:
            if _overlap(piece, other[1]):
                return (rank, piece), other
        reaching.append((rank, piece))
    return None


def _overlap(a: Piece, b: Piece) -> bool:
    sides = zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    return all(a0 < b0 + bn and b0 < a0 + an for a0, an, b0, bn in sides)


def document(manifest: Manifest) -> bytes:
    """The manifest's sealed document."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "id": manifest.id,
        "run": manifest.run,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "base_step": manifest.base_step,
        "created_unix_s": manifest.created_unix_s,
        "parts": [[p.rank, p.part_bytes, p.part_xxh3, p.data_bytes] for p in manifest.parts],
        "tensors": {name: [t.dtype, t.shape, t.owner] for name, t in manifest.tensors.items()},
        "tied": manifest.tied,
    }
    return seal(dumps(body))


def parse(text: bytes, what: str) -> Manifest:
    """The manifest in a document.

    Raises:
        Corrupt: its bytes have changed, or it is not a manifest.
        Unsupported: written by a newer format.
    """
    body = unseal(text, what)
    check_kind(body, FORMAT, VERSION, what)
    try:
        return _parse(body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{what} is sealed but lacks what a manifest holds: {error!r}.", key=what) from error


def _parse(body: dict[str, Any]) -> Manifest:
    return Manifest(
        id=body["id"],
        run=body["run"],
        step=body["step"],
        attempt=body["attempt"],
        world_size=body["world_size"],
        base_step=body["base_step"],
        created_unix_s=body["created_unix_s"],
        parts=tuple(PartFile(*row) for row in body["parts"]),
        tensors={name: Tensor(row[0], tuple(row[1]), row[2]) for name, row in body["tensors"].items()},
        tied=body["tied"],
    )
