"""Part: the document of one rank's files, with their tensors, chunk hashes, and the rank's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from holdfast.checkpoint.format import names, sections
from holdfast.checkpoint.format.catalog import Catalog, check_tensor, parse_catalog
from holdfast.checkpoint.format.hashes import DIGITS, digest
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.format.limits import (
    MAX_DEPTH,
    MAX_DOCUMENT_BYTES,
    AttemptNumber,
    Hash,
    Name,
    Rank,
    RunId,
    Sizes,
    Step,
    WorldSize,
)
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sealed import Versions, dumps, facts_of, seal, seal_of, unseal_lines
from holdfast.checkpoint.format.sections import MAX_PART_BYTES, SectionRows, Sections
from holdfast.errors import Corrupt
from holdfast.system.documents import MAX_COUNT, Count, decode_as

Ancestors = tuple[CheckpointId, ...]  # checkpoints that led to one by restores, oldest first
_Starts = tuple[Count, ...]
_FileSizes = tuple[Count, Annotated[int, Meta(ge=1, le=MAX_COUNT)]]  # bytes of a file, and of its chunks


class DataFile(Struct, frozen=True):
    """Size and chunk hashes of a data file."""

    num_bytes: int
    chunk_bytes: int
    hashes: str  # xxh3-128 of each chunk, in order, 32 digits each

    def hash_of(self, chunk: int) -> str:
        """Return the hash of a chunk."""
        return self.hashes[DIGITS * chunk : DIGITS * (chunk + 1)]


class PartFacts(Struct, frozen=True):
    """Facts about a part when its save is staged."""

    run: RunId
    step: Step
    attempt: AttemptNumber
    rank: Rank
    world_size: WorldSize
    ancestors: Ancestors
    values: dict[str, Any]  # tagged JSON, see values.decode
    own: tuple[tuple[Name, str, Sizes, Count], ...]  # name, dtype, shape, start


class _PartMembers(PartFacts, frozen=True):
    """Members of a part's first line. The hashes are not in it: most readers need those of no rank."""

    catalog: Hash
    file: _FileSizes
    frozen: _FileSizes | None = None
    watches: SectionRows = {}


class Part(PartFacts, frozen=True, dict=True):
    """One rank's contribution to a checkpoint.

    Its shards are those that the catalog assigns to this rank, in the order of the catalog, followed by
    `own`: its per-rank tensors.
    """

    file: DataFile
    frozen: DataFile | None  # the second data file, with the frozen tensors
    catalog_digest: str
    catalog_text: bytes
    starts_text: bytes  # of the shards that the catalog assigns to this rank
    seal: str  # hash of the document without its catalog, which the catalog's digest represents
    document_bytes: int
    what: str  # name of its document, for errors
    watches: Sections = {}  # findings about the rank's files

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog, parsed at the first use."""
        return parse_catalog(self.catalog_text, self.what)

    @property
    def num_shards(self) -> int:
        """Number of shards that the catalog assigns to this rank, counted without parsing their starts."""
        return _count_integers(self.starts_text)

    @cached_property
    def catalog_starts(self) -> tuple[int, ...]:
        """Byte offset of each shard that the catalog assigns to this rank, parsed at the first use."""
        try:
            return decode_as(_Starts, self.starts_text, "the starts", max_bytes=MAX_DOCUMENT_BYTES)
        except Corrupt as error:
            raise self._corrupt(
                f"is sealed, but its starts cannot be parsed: {str(error).rstrip('.')}."
            ) from error

    def _corrupt(self, why: str) -> Corrupt:
        return Corrupt(f"{self.what} {why}", step=self.step, rank=self.rank, key=self.what)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """All shards, in the order of `starts`."""
        shared = list(self.catalog.shards_of(self.rank))
        if len(shared) != len(self.catalog_starts):
            raise self._corrupt(
                f"lists the starts of {len(self.catalog_starts)} shards, but by its catalog "
                f"rank {self.rank} wrote {len(shared)}."
            )
        own = (Shard.whole(name, dtype, shape, per_rank=True) for name, dtype, shape, _ in self.own)
        return (*shared, *own)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Byte offset of each shard in its data file."""
        return (*self.catalog_starts, *(start for *_, start in self.own))

    @property
    def files(self) -> dict[str, DataFile]:
        """The data files by the names of their objects."""
        found = {self.file_name(frozen=False): self.file}
        return found if self.frozen is None else found | {self.file_name(frozen=True): self.frozen}

    @property
    def listed(self) -> tuple[int, str, int, int | None]:
        """Bytes and seal of the document, bytes of the data file and of the second one: see `PartFile`."""
        frozen_bytes = None if self.frozen is None else self.frozen.num_bytes
        return self.document_bytes, self.seal, self.file.num_bytes, frozen_bytes

    def file_name(self, *, frozen: bool) -> str:
        """Return the name of the object that holds the frozen shards, or the others."""
        return (names.frozen if frozen else names.data)(self.step, self.attempt, self.rank)


def draft(facts: PartFacts, starts: Sequence[int], catalog: bytes, *, catalog_digest: str = "") -> bytes:
    """Return a part without facts about its files, made when a save is staged; see `Part`.

    `starts` are those of the shards that the catalog, a text, assigns to this rank. A caller that has the
    catalog's digest already passes it.
    """
    members = {**asdict(facts), "catalog": catalog_digest or digest(catalog)}
    return b"\n".join((VERSIONS.line(members), catalog, dumps(starts)))


Copies = Mapping[str, tuple[tuple[Count, Count], ...]]
"""Offset and size in the arena of each copy that a keeper hashes, by the name of the watch that wants it."""


class _Findings(Struct):
    """Last line of a draft: what the watches of the trainer have found, and the copies to hash."""

    watches: SectionRows
    copies: Copies


def add_findings(draft_text: bytes, found: Sections, copies: Copies) -> bytes:
    """Return a draft with the sections of the trainer, and the copies to hash.

    The copies are for the keeper only: the document does not contain their places.
    """
    if not found and not copies:
        return draft_text
    return draft_text + b"\n" + dumps({"watches": sections.write(found), "copies": copies})


def findings_of(draft_text: bytes, what: str) -> tuple[Sections, Copies]:
    """Return the sections in a draft, and the copies to hash."""
    _, _, _, *lines = draft_text.split(b"\n", 3)
    if not lines:
        return {}, {}
    try:
        found = decode_as(_Findings, lines[0], what, max_bytes=MAX_DOCUMENT_BYTES, max_depth=MAX_DEPTH)
        return sections.read(found.watches, max_bytes=MAX_PART_BYTES), found.copies
    except (Corrupt, ValueError) as error:
        raise Corrupt(f"{what} has findings of watches that cannot be parsed: {error}", key=what) from error


def finish(
    draft_text: bytes,
    file: DataFile,
    frozen: DataFile | None = None,
    watches: Sections = MappingProxyType({}),
) -> bytes:
    """Return the part document: the draft, and the facts and findings about its files, sealed.

    The catalog is its last line, so that a reader of many parts need not read it again with each.
    """
    facts, catalog, starts = draft_text.split(b"\n", 3)[:3]
    files = [one for one in (file, frozen) if one is not None]
    sizes = [[one.num_bytes, one.chunk_bytes] for one in files]
    members = {"file": sizes[0], "frozen": sizes[1] if frozen else None}
    members |= {"watches": sections.write(watches)} if watches else {}
    hashes = [dumps(one.hashes) for one in files]
    text = seal(b"\n".join((facts[:-1] + b"," + dumps(members)[1:], starts, *hashes)))
    return b"\n".join((text, catalog))


def differ_in_watches_only(own: bytes, other: bytes, what: str) -> bool:
    """Return True if two part documents describe the same files of the same save."""
    written: Any = {"watches": {}, "seal": "", "document_bytes": 0}
    return replace(parse(own, what), **written) == replace(parse(other, what), **written)


def parse(document: bytes, what: str) -> Part:
    """Parse a part; its catalog and starts are parsed at the first use."""
    text, _, catalog = bytes(document).rpartition(b"\n")
    # A document of one line is of another kind, which the error states.
    return parse_without_catalog(text or catalog, what, {digest(catalog): catalog})


def parse_without_catalog(text: bytes, what: str, catalogs: Mapping[str, bytes]) -> Part:
    """Parse the lines of a part before its catalog, which is the one of `catalogs` with its digest."""
    head, *lines = unseal_lines(text, what)
    try:
        return _parse(VERSIONS.read(head, what), lines, text, what, catalogs)
    except (Corrupt, ValueError) as error:
        raise Corrupt(f"{what} is sealed but is not a valid part: {error}", key=what) from error


def _parse(
    members: _PartMembers, lines: list[bytes], text: bytes, what: str, catalogs: Mapping[str, bytes]
) -> Part:
    if members.catalog not in catalogs:
        raise ValueError("its catalog does not match its digest")
    catalog = catalogs[members.catalog]
    sizes = [one for one in (members.file, members.frozen) if one is not None]
    if len(lines) != 1 + len(sizes):
        raise ValueError(f"it has {max(0, len(lines) - 1)} lines of hashes for {len(sizes)} files")
    starts, *hashes = lines
    _count_integers(starts)
    if members.rank >= members.world_size:
        raise ValueError(f"it is of rank {members.rank} of {members.world_size}")
    for name, dtype, shape, _ in members.own:
        check_tensor(name, dtype, shape)
    file, *frozen = map(_file, sizes, hashes)
    return Part(
        **facts_of(members, PartFacts),
        file=file,
        frozen=frozen[0] if frozen else None,
        catalog_digest=members.catalog,
        catalog_text=catalog,
        starts_text=starts,
        seal=seal_of(text),
        document_bytes=len(text) + 1 + len(catalog),
        what=what,
        watches=sections.read(members.watches, max_bytes=MAX_PART_BYTES),
    )


@lru_cache(maxsize=4)  # most ranks have the same starts
def _count_integers(line: bytes) -> int:
    # The integers are checked at their first use. A commit only counts them, for which digits with one comma
    # between two of them are enough.
    items, commas = line[1:-1], line.translate(None, b"0123456789")[1:-1]
    if line[:1] + line[-1:] != b"[]" or commas.strip(b",") or (items and b",," in b",%b," % items):
        raise ValueError("its starts are not an array of integers")
    return len(commas) + 1 if items else 0


def _file(sizes: tuple[int, int], line: bytes) -> DataFile:
    num_bytes, chunk_bytes = sizes
    num_chunks = -(-num_bytes // chunk_bytes)
    if line[:1] + line[-1:] != b'""' or len(line) != DIGITS * num_chunks + 2:
        raise ValueError(f"{len(line) - 2} digits of chunk hashes for {num_chunks} chunks")
    return DataFile(num_bytes, chunk_bytes, str(memoryview(line)[1:-1], "ascii"))


VERSIONS = Versions("holdfast-part", written=1, types={1: _PartMembers})
