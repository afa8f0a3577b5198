"""The manifest: the commit record of a checkpoint, made from all its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Corrupt, HoldfastError, InvalidInput
from holdfast.format.agreement import Agreement, agree
from holdfast.format.catalog import EACH, SPLIT, Tensor
from holdfast.format.hashes import digest
from holdfast.format.part import Ancestors, Part, check_kind
from holdfast.format.part import parse as parse_part
from holdfast.format.sealed import dumps, loads, seal, unseal_lines

__all__ = ["EACH", "SPLIT", "Manifest", "PartFile", "Tensor", "document", "merge", "merge_documents", "parse"]

FORMAT, VERSION = "holdfast-manifest", 1


@dataclass(frozen=True, slots=True)
class PartFile:
    """What the manifest knows of a rank's files."""

    rank: int
    part_bytes: int
    part_xxh3: str
    data_bytes: int
    frozen_bytes: int | None  # of the second data file; None if there is none
    catalog: int  # index of the rank's catalog


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint."""

    id: str  # random; tells one's own commit from another's after an unclear answer
    run: str
    step: int
    attempt: int
    world_size: int
    ancestors: Ancestors
    created_unix_s: float  # for people; never used to order checkpoints
    parts: tuple[PartFile, ...]
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    catalogs: tuple[bytes, ...]  # each different one, as it stands in the parts

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(part.data_bytes + (part.frozen_bytes or 0) for part in self.parts)

    @property
    def base_step(self) -> int | None:
        """Step that the writing attempt was restored from; None if it began from nothing."""
        return self.ancestors[-1][1] if self.ancestors else None


def merge_documents(documents: Sequence[tuple[str, bytes]], *, id: str, created_unix_s: float) -> Manifest:
    """`merge` for documents as they lie in the store, each with its name.

    Raises:
        Corrupt: a part is damaged.
        Unsupported: a part was written by a newer format.
        InvalidInput: as `merge`.
    """
    parts = [(parse_part(text, name), text) for name, text in documents]
    return merge(parts, id=id, created_unix_s=created_unix_s)


def merge(parts: Sequence[tuple[Part, bytes]], *, id: str, created_unix_s: float) -> Manifest:
    """The manifest of a checkpoint from all its parts, each with its document's bytes.

    Raises:
        Corrupt: a catalog cannot be read.
        InvalidInput: the parts do not belong together, or do not cover each tensor exactly once.
    """
    first = parts[0][0]
    try:
        agreed, texts, catalog_of = _fit(parts)
    except InvalidInput as error:
        message = f"Step {first.step} was not committed: {error} Earlier checkpoints stand."
        raise InvalidInput(message, step=first.step, rank=error.rank, key=error.key) from error
    return Manifest(
        id=id,
        run=first.run,
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        ancestors=first.ancestors,
        created_unix_s=created_unix_s,
        parts=tuple(
            PartFile(
                part.rank,
                len(document),
                digest(document),
                part.file.num_bytes,
                None if part.frozen is None else part.frozen.num_bytes,
                index,
            )
            for (part, document), index in zip(parts, catalog_of, strict=True)
        ),
        tensors=agreed.tensors | _each(part for part, _ in parts),
        tied=agreed.tied,
        catalogs=texts,
    )


def _fit(parts: Sequence[tuple[Part, bytes]]) -> tuple[Agreement, tuple[bytes, ...], tuple[int, ...]]:
    first = parts[0][0]
    if [part.rank for part, _ in parts] != list(range(first.world_size)):
        found = [part.rank for part, _ in parts]
        raise InvalidInput(f"it needs the parts of ranks 0 to {first.world_size - 1}, found {found}.")
    indices: dict[str, int] = {}
    texts: list[bytes] = []
    for part, _ in parts:
        _check_same_checkpoint(part, first)
        if part.catalog_digest not in indices:
            indices[part.catalog_digest] = len(texts)
            texts.append(part.catalog_text)
    catalog_of = tuple(indices[part.catalog_digest] for part, _ in parts)
    agreed = agree(tuple(texts), catalog_of)
    for (part, _), expected in zip(parts, agreed.num_pieces, strict=True):
        _check_part(part, expected, agreed.tensors)
    return agreed, tuple(texts), catalog_of


def _check_same_checkpoint(part: Part, first: Part) -> None:
    for fact in ("run", "step", "attempt", "world_size", "ancestors"):
        if getattr(part, fact) != getattr(first, fact):
            raise InvalidInput(
                f"rank {part.rank} says {fact}={getattr(part, fact)!r}, rank {first.rank} says "
                f"{getattr(first, fact)!r}: their parts do not belong to one checkpoint.",
                rank=part.rank,
            )


def _check_part(part: Part, num_pieces: int, tensors: Mapping[str, Tensor]) -> None:
    if len(part.catalog_starts) != num_pieces:
        raise InvalidInput(
            f"rank {part.rank} wrote {len(part.catalog_starts)} pieces, but the catalogs say {num_pieces}.",
            rank=part.rank,
        )
    for name, *_ in part.own:
        if name in tensors:
            raise InvalidInput(
                f"Ranks disagree about {name}: rank {part.rank} has its own, for rank "
                f"{tensors[name].held_by[0]} several ranks share it.",
                rank=part.rank,
                key=name,
            )


def _each(parts: Any) -> dict[str, Tensor]:
    """Tensors of which every rank has its own, as the first rank that has one has it."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, dtype, shape, _ in part.own:
            if name not in found:
                found[name] = Tensor(dtype, shape, None)
    return found


def document(manifest: Manifest) -> bytes:
    """The manifest's sealed document."""
    each = {name: [t.dtype, t.shape] for name, t in manifest.tensors.items() if t.cut is None}
    head = dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "id": manifest.id,
            "run": manifest.run,
            "step": manifest.step,
            "attempt": manifest.attempt,
            "world_size": manifest.world_size,
            "ancestors": manifest.ancestors,
            "created_unix_s": manifest.created_unix_s,
            "parts": [
                [p.rank, p.part_bytes, p.part_xxh3, p.data_bytes, p.frozen_bytes, p.catalog]
                for p in manifest.parts
            ],
            "each": each,
        }
    )
    return seal(b"\n".join((head, *manifest.catalogs)))


def parse(text: bytes, what: str) -> Manifest:
    """The manifest in a document.

    Raises:
        Corrupt: its bytes have changed, or it is not a manifest.
        Unsupported: written by a newer format.
    """
    head, *catalogs = unseal_lines(text, what)
    body = loads(head, what)
    check_kind(body, FORMAT, VERSION, what)
    try:
        return _parse(body, tuple(catalogs))
    except (LookupError, TypeError, ValueError, AttributeError, HoldfastError) as error:
        raise Corrupt(f"{what} is sealed but lacks what a manifest holds: {error!r}.", key=what) from error


def _parse(body: dict[str, Any], catalogs: tuple[bytes, ...]) -> Manifest:
    parts = tuple(PartFile(*row) for row in body["parts"])
    agreed = agree(catalogs, tuple(part.catalog for part in parts))
    each = {name: Tensor(dtype, tuple(shape), None) for name, (dtype, shape) in body["each"].items()}
    return Manifest(
        id=body["id"],
        run=body["run"],
        step=body["step"],
        attempt=body["attempt"],
        world_size=body["world_size"],
        ancestors=tuple((attempt, step) for attempt, step in body["ancestors"]),
        created_unix_s=body["created_unix_s"],
        parts=parts,
        tensors=agreed.tensors | each,
        tied=agreed.tied,
        catalogs=catalogs,
    )
