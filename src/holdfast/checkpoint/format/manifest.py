"""Manifest: the commit record of a checkpoint, made from all its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format import sections
from holdfast.checkpoint.format.agreement import Agreement, agree
from holdfast.checkpoint.format.catalog import EACH, SPLIT, Tensor, check_facts, columns
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.limits import (
    HASH,
    MAX_ATTEMPT,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_DOCUMENT_BYTES,
    MAX_RANKS,
    MAX_STEP,
    RUN_ID,
)
from holdfast.checkpoint.format.names import OfCheckpoint
from holdfast.checkpoint.format.part import Ancestors, Part, read_ancestors
from holdfast.checkpoint.format.sealed import Versions, dumps, seal, unseal_lines
from holdfast.checkpoint.format.sections import MAX_MANIFEST_BYTES, Health, Sections, health_of
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import Fields, decode_object, read_integers, shown

__all__ = ["EACH", "SPLIT", "Manifest", "PartFile", "Tensor", "document", "merge", "parse"]


class PartFile(Struct, frozen=True):
    """The manifest's facts about a rank's files."""

    rank: int
    part_bytes: int
    part_xxh3: str
    data_bytes: int
    frozen_bytes: int | None  # of the second data file; None without one
    catalog: int  # index of the rank's catalog


class Manifest(OfCheckpoint, Struct, frozen=True):
    """A complete checkpoint."""

    id: str  # random; distinguishes our own commit from others' if an answer was lost
    run: str
    step: int
    attempt: int
    world_size: int
    ancestors: Ancestors
    created_unix_s: float  # for people; never used to order checkpoints
    parts: tuple[PartFile, ...]
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    catalogs: tuple[bytes, ...]  # each different one, with the bytes of the parts
    watches: Sections = {}  # findings about all files

    @property
    def health(self) -> Health:
        """Health by the marks of the watches."""
        return health_of(self.watches)

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(part.data_bytes + (part.frozen_bytes or 0) for part in self.parts)

    @property
    def base_step(self) -> int | None:
        """Step that the writing attempt was restored from; None if it started from scratch."""
        return self.ancestors[-1].step if self.ancestors else None


def merge(parts: Iterable[tuple[Part, bytes]], *, id: str, created_unix_s: float) -> Manifest:
    """Merge all parts of a checkpoint, each with its document's bytes, into a manifest.

    It reads the parts, at least one, in the order of ranks, and keeps none of them but the first, because
    those of a thousand ranks contain many hashes.
    """
    first: Part | None = None
    files: list[PartFile] = []
    catalogs: dict[str, tuple[int, bytes]] = {}  # number and text, by digest
    num_shards: list[int] = []  # by rank
    each: dict[str, tuple[Tensor, int]] = {}  # the first rank's tensor, and that rank
    try:
        for part, text in parts:
            first = first or part
            _check_same_checkpoint(part, first)
            _check_rank(part.rank, len(files))
            number, _ = catalogs.setdefault(part.catalog_digest, (len(catalogs), part.catalog_text))
            frozen_bytes = None if part.frozen is None else part.frozen.num_bytes
            sizes = len(text), digest(text), part.file.num_bytes, frozen_bytes
            files.append(PartFile(part.rank, *sizes, number))
            num_shards.append(part.num_shards)
            for name, dtype, shape, _ in part.own:
                each.setdefault(name, (Tensor(dtype, shape, None), part.rank))
        assert first is not None
        _check_complete(files, first.world_size)
        texts = tuple(text for _, text in catalogs.values())
        agreed = agree(texts, tuple(file.catalog for file in files))
        _check_written(agreed, num_shards, each)
    except InvalidInput as error:
        assert first is not None
        raise InvalidInput(
            f"Step {first.step} was not committed: {error} Earlier checkpoints remain.",
            step=first.step,
            rank=error.rank,
            key=error.key,
        ) from error
    return Manifest(
        id=id,
        run=first.run,
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        ancestors=first.ancestors,
        created_unix_s=created_unix_s,
        parts=tuple(files),
        tensors=agreed.tensors | {name: tensor for name, (tensor, _) in each.items()},
        tied=agreed.tied,
        catalogs=texts,
    )


def _check_rank(found: int, expected: int) -> None:
    if found != expected:
        raise InvalidInput(f"the part of rank {expected} is missing; found that of rank {found}.", rank=found)


def _check_complete(files: list[PartFile], world_size: int) -> None:
    if len(files) != world_size:
        raise InvalidInput(f"it needs the parts of {world_size} ranks, found {len(files)}.")


def _check_written(agreed: Agreement, num_shards: list[int], each: dict[str, tuple[Tensor, int]]) -> None:
    for rank, (found, expected) in enumerate(zip(num_shards, agreed.num_shards, strict=True)):
        if found != expected:
            raise InvalidInput(
                f"rank {rank} wrote {found} shards, but the catalogs list {expected}.", rank=rank
            )
    for name, (_, rank) in each.items():
        if name in agreed.tensors:
            raise InvalidInput(
                f"Ranks disagree about {name}: rank {rank} has its own, but rank "
                f"{agreed.tensors[name].held_by[0]} lists it as shared by several ranks.",
                rank=rank,
                key=name,
            )
    _check_tied(agreed.tied, agreed.tensors.keys() | each.keys())


def _check_same_checkpoint(part: Part, first: Part) -> None:
    for fact in ("run", "step", "attempt", "world_size", "ancestors"):
        ours, theirs = getattr(part, fact), getattr(first, fact)
        if ours != theirs:
            if fact == "ancestors":
                ours, theirs = (tuple(map(tuple, ancestors)) for ancestors in (ours, theirs))
            raise InvalidInput(
                f"rank {part.rank} has {fact}={ours!r}, rank {first.rank} has {theirs!r}: their parts do not "
                "belong to one checkpoint.",
                rank=part.rank,
            )


def _check_tied(tied: Mapping[str, str], names: Set[str]) -> None:
    for alias, name in tied.items():
        if name not in names:
            raise InvalidInput(f"{alias} is an alias of {name}, but no rank has such a tensor.", key=alias)


def document(manifest: Manifest) -> bytes:
    """Return the manifest's sealed document."""
    each = {name: [t.dtype, t.shape] for name, t in manifest.tensors.items() if t.partitioning is None}
    head = dumps(
        {
            **VERSIONS.header,
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
            **sections.members(manifest.watches),
        }
    )
    return seal(b"\n".join((head, *manifest.catalogs)))


def parse(text: bytes, what: str) -> Manifest:
    """Parse a manifest."""
    head, *catalogs = unseal_lines(text, what)
    body = decode_object(head, what, max_bytes=MAX_DOCUMENT_BYTES, max_depth=MAX_DEPTH)
    parse_body = VERSIONS.parser(body, what)
    try:
        return parse_body(body, tuple(catalogs))
    except (Corrupt, ValueError) as error:
        raise Corrupt(f"{what} is sealed but is not a valid manifest: {error}", key=what) from error


def _parse_v1(body: Fields, catalogs: tuple[bytes, ...]) -> Manifest:
    rows = body.array("parts", max_items=MAX_RANKS)
    world_size = body.integer("world_size", at_least=1, at_most=MAX_RANKS)
    parts = tuple(_part_file(row, rank, len(catalogs)) for rank, row in enumerate(rows))
    if len(parts) != world_size:
        raise ValueError(f"it has {world_size} ranks but lists the parts of {len(parts)}")
    agreed = agree(catalogs, tuple(part.catalog for part in parts))
    each = {name: _each_tensor(name, row) for name, row in body.fields("each").members.items()}
    if both := each.keys() & agreed.tensors.keys():
        raise ValueError(f"{shown(min(both))} is listed both as a per-rank tensor and as a shared one")
    _check_tied(agreed.tied, agreed.tensors.keys() | each.keys())
    return Manifest(
        id=body.text("id", max_chars=128),
        run=body.text("run", pattern=RUN_ID),
        step=body.integer("step", at_most=MAX_STEP),
        attempt=body.integer("attempt", at_most=MAX_ATTEMPT),
        world_size=world_size,
        ancestors=read_ancestors(body),
        created_unix_s=body.number("created_unix_s", at_least=0.0),
        parts=parts,
        tensors=agreed.tensors | each,
        tied=agreed.tied,
        catalogs=catalogs,
        watches=sections.read(body, max_bytes=MAX_MANIFEST_BYTES),
    )


def _part_file(row: Any, expected_rank: int, num_catalogs: int) -> PartFile:
    rank, part_bytes, part_xxh3, data_bytes, frozen_bytes, catalog = columns(row, 6, "a part")
    if rank != expected_rank:
        raise ValueError(f"expected the part of rank {expected_rank}, found that of {shown(rank)}")
    read_integers([rank, part_bytes, data_bytes, 0 if frozen_bytes is None else frozen_bytes])
    read_integers([catalog], at_most=num_catalogs - 1)
    if type(part_xxh3) is not str or not HASH.fullmatch(part_xxh3):
        raise ValueError(f"the part of rank {rank} has the hash {shown(part_xxh3)}")
    return PartFile(rank, part_bytes, part_xxh3, data_bytes, frozen_bytes, catalog)


def _each_tensor(name: str, row: Any) -> Tensor:
    dtype, shape = columns(row, 2, "a tensor of each rank")
    check_facts(name, dtype)
    return Tensor(dtype, read_integers(shape, max_items=MAX_DIMS), None)


VERSIONS = Versions("holdfast-manifest", written=1, parsers={1: _parse_v1})
