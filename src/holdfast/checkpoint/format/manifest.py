"""Manifest: the commit record of a checkpoint, made from all its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.checkpoint.format import sections
from holdfast.checkpoint.format.agreement import Agreement, agree
from holdfast.checkpoint.format.catalog import EACH, SPLIT, Tensor, check_tensor
from holdfast.checkpoint.format.limits import (
    MAX_RANKS,
    AttemptNumber,
    Hash,
    Name,
    Rank,
    RunId,
    Sizes,
    Step,
    UnixSeconds,
    WorldSize,
)
from holdfast.checkpoint.format.names import OfCheckpoint
from holdfast.checkpoint.format.part import Ancestors, Part
from holdfast.checkpoint.format.sealed import Versions, facts_of, seal, unseal_lines
from holdfast.checkpoint.format.sections import MAX_MANIFEST_BYTES, Health, SectionRows, Sections, health_of
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import Count, shown, to_plain

__all__ = ["EACH", "SPLIT", "Manifest", "PartFile", "Tensor", "document", "merge", "parse"]


class PartFile(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The manifest's facts about a rank's files."""

    rank: Rank
    part_bytes: Count
    seal: Hash
    data_bytes: Count
    frozen_bytes: Count | None  # of the second data file; None without one
    catalog: Count  # index of the rank's catalog


class ManifestFacts(Struct, frozen=True):
    """Facts about a complete checkpoint, but not about its tensors."""

    id: Annotated[str, Meta(max_length=128)]
    """Random; it distinguishes our own commit from others' if an answer was lost."""
    run: RunId
    step: Step
    attempt: AttemptNumber
    world_size: WorldSize
    ancestors: Ancestors
    created_unix_s: UnixSeconds  # for people; never used to order checkpoints
    parts: Annotated[tuple[PartFile, ...], Meta(max_length=MAX_RANKS)]


class _ManifestMembers(ManifestFacts, frozen=True, omit_defaults=True):
    """Members of a manifest's first line."""

    each: dict[Name, tuple[str, Sizes]]  # dtype and shape of the per-rank tensors
    watches: SectionRows = {}


class Manifest(OfCheckpoint, ManifestFacts, frozen=True):
    """A complete checkpoint."""

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


_SHARED = ("run", "step", "attempt", "world_size", "ancestors")  # facts that all parts of a checkpoint share


def merge(parts: Iterable[Part], *, id: str, created_unix_s: float) -> Manifest:
    """Merge all parts of a checkpoint into a manifest.

    It reads the parts, at least one, in the order of ranks, and keeps none of them but the first, because
    those of a thousand ranks contain many hashes.
    """
    first: Part | None = None
    files: list[PartFile] = []
    catalogs: dict[str, tuple[int, bytes]] = {}  # number and text, by digest
    num_shards: list[int] = []  # by rank
    each: dict[str, tuple[Tensor, int]] = {}  # the first rank's tensor, and that rank
    try:
        for part in parts:
            first = first or part
            _check_part(part, first, rank=len(files))
            number, _ = catalogs.setdefault(part.catalog_digest, (len(catalogs), part.catalog_text))
            files.append(PartFile(part.rank, *part.listed, number))
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
        **{fact: getattr(first, fact) for fact in _SHARED},
        id=id,
        created_unix_s=created_unix_s,
        parts=tuple(files),
        tensors=agreed.tensors | {name: tensor for name, (tensor, _) in each.items()},
        tied=agreed.tied,
        catalogs=texts,
    )


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


def _check_part(part: Part, first: Part, *, rank: int) -> None:
    for fact in _SHARED:
        ours, theirs = getattr(part, fact), getattr(first, fact)
        if ours != theirs:
            if fact == "ancestors":
                ours, theirs = (tuple(map(tuple, ancestors)) for ancestors in (ours, theirs))
            raise InvalidInput(
                f"rank {part.rank} has {fact}={ours!r}, rank {first.rank} has {theirs!r}: their parts do not "
                "belong to one checkpoint.",
                rank=part.rank,
            )
    if part.rank != rank:
        raise InvalidInput(
            f"the part of rank {rank} is missing; found that of rank {part.rank}.", rank=part.rank
        )


def _check_tied(tied: Mapping[str, str], names: Set[str]) -> None:
    for alias, name in tied.items():
        if name not in names:
            raise InvalidInput(f"{alias} is an alias of {name}, but no rank has such a tensor.", key=alias)


def document(manifest: Manifest) -> bytes:
    """Return the manifest's sealed document."""
    each = {name: (t.dtype, t.shape) for name, t in manifest.tensors.items() if t.partitioning is None}
    members = _ManifestMembers(
        **facts_of(manifest, ManifestFacts), each=each, watches=sections.write(manifest.watches)
    )
    return seal(b"\n".join((VERSIONS.line(to_plain(members)), *manifest.catalogs)))


def parse(text: bytes, what: str) -> Manifest:
    """Parse a manifest."""
    head, *catalogs = unseal_lines(text, what)
    try:
        return _parse(VERSIONS.read(head, what), tuple(catalogs))
    except (Corrupt, ValueError) as error:
        raise Corrupt(f"{what} is sealed but is not a valid manifest: {error}", key=what) from error


def _parse(members: _ManifestMembers, catalogs: tuple[bytes, ...]) -> Manifest:
    for expected, part in enumerate(members.parts):
        if part.rank != expected or part.catalog >= len(catalogs):
            raise ValueError(
                f"expected the part of rank {expected} with one of {len(catalogs)} catalogs, found that of "
                f"rank {part.rank} with catalog {part.catalog}"
            )
    if len(members.parts) != members.world_size:
        raise ValueError(f"it has {members.world_size} ranks but lists the parts of {len(members.parts)}")
    agreed = agree(catalogs, tuple(part.catalog for part in members.parts))
    each = {name: Tensor(dtype, shape, None) for name, (dtype, shape) in members.each.items()}
    for name, tensor in each.items():
        check_tensor(name, tensor.dtype, tensor.shape)
    if both := each.keys() & agreed.tensors.keys():
        raise ValueError(f"{shown(min(both))} is listed both as a per-rank tensor and as a shared one")
    _check_tied(agreed.tied, agreed.tensors.keys() | each.keys())
    return Manifest(
        **facts_of(members, ManifestFacts),
        tensors=agreed.tensors | each,
        tied=agreed.tied,
        catalogs=catalogs,
        watches=sections.read(members.watches, max_bytes=MAX_MANIFEST_BYTES),
    )


VERSIONS = Versions("holdfast-manifest", written=1, types={1: _ManifestMembers})
