"""Part: the document of one rank's files, with their tensors, chunk hashes, and the rank's values."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format import names, sections
from holdfast.checkpoint.format.catalog import Catalog, check_facts, check_size, columns, parse_catalog
from holdfast.checkpoint.format.hashes import DIGITS, digest
from holdfast.checkpoint.format.layout import Shard
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
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sealed import Versions, dumps, seal, unseal_lines
from holdfast.checkpoint.format.sections import MAX_PART_BYTES, Sections
from holdfast.errors import Corrupt
from holdfast.system.documents import Fields, decode, decode_object, read_integers

_get_start = operator.itemgetter(3)
Ancestors = tuple[CheckpointId, ...]  # checkpoints that led to one by restores, oldest first


class DataFile(Struct, frozen=True):
    """Size and chunk hashes of a data file."""

    num_bytes: int
    chunk_bytes: int
    hashes: str  # xxh3-128 of each chunk, in order, 32 digits each

    def hash_of(self, chunk: int) -> str:
        """Return the hash of a chunk."""
        return self.hashes[DIGITS * chunk : DIGITS * (chunk + 1)]


class Part(Struct, frozen=True, dict=True):
    """One rank's contribution to a checkpoint.

    Its shards are those that the catalog assigns to this rank, in the order of the catalog, followed by
    `own`: its per-rank tensors.
    """

    run: str
    step: int
    attempt: int
    rank: int
    world_size: int
    ancestors: Ancestors
    values: dict[str, Any]  # tagged JSON, see values.decode
    own: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, start
    file: DataFile
    frozen: DataFile | None  # the second data file, with the frozen tensors
    catalog_digest: str
    catalog_text: bytes
    starts_text: bytes  # of the shards that the catalog assigns to this rank
    what: str  # name of its document, for errors
    watches: Sections = {}  # findings about the rank's files

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog, parsed at the first use."""
        return parse_catalog(self.catalog_text, self.what)

    @property
    def num_shards(self) -> int:
        """Number of shards that the catalog assigns to this rank, counted without parsing their starts."""
        return 0 if self.starts_text == b"[]" else self.starts_text.count(b",") + 1

    @cached_property
    def catalog_starts(self) -> tuple[int, ...]:
        """Byte offset of each shard that the catalog assigns to this rank, parsed at the first use."""
        try:
            return read_integers(decode(self.starts_text, "the starts", max_bytes=MAX_DOCUMENT_BYTES))
        except (ValueError, Corrupt) as error:
            raise self._corrupt(f"is sealed, but its starts cannot be parsed: {error}.") from error

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
        return (*self.catalog_starts, *map(_get_start, self.own))

    @property
    def files(self) -> dict[str, DataFile]:
        """The data files by the names of their objects."""
        found = {self.file_name(frozen=False): self.file}
        return found if self.frozen is None else found | {self.file_name(frozen=True): self.frozen}

    def file_name(self, *, frozen: bool) -> str:
        """Return the name of the object that holds the frozen shards, or the others."""
        return (names.frozen if frozen else names.data)(self.step, self.attempt, self.rank)


def draft(
    *,
    run: str,
    step: int,
    attempt: int,
    rank: int,
    world_size: int,
    ancestors: Ancestors,
    values: dict[str, Any],
    own: Sequence[tuple[str, str, tuple[int, ...], int]],
    starts: Sequence[int],
    catalog: bytes,
    catalog_digest: str = "",
) -> bytes:
    """Return a part without facts about its files, made when a save is staged; see `Part`.

    `starts` are those of the shards that the catalog, a text, assigns to this rank. A caller that has the
    catalog's digest already passes it.
    """
    facts = dumps(
        {
            **VERSIONS.header,
            "run": run,
            "step": step,
            "attempt": attempt,
            "rank": rank,
            "world_size": world_size,
            "ancestors": ancestors,
            "values": values,
            "own": own,
            "catalog": catalog_digest or digest(catalog),
        }
    )
    return b"\n".join((facts, catalog, dumps(starts)))


Copies = Mapping[str, tuple[tuple[int, int], ...]]
"""Offset and size in the arena of each copy that a keeper hashes, by the name of the watch that wants it."""


def add_findings(draft_text: bytes, found: Sections, copies: Copies) -> bytes:
    """Return a draft with the sections of the trainer, and the copies to hash.

    The copies are for the keeper only: the document does not contain their places.
    """
    if not found and not copies:
        return draft_text
    return draft_text + b"\n" + dumps({**sections.members(found), "copies": copies})


def findings_of(draft_text: bytes, what: str) -> tuple[Sections, Copies]:
    """Return the sections in a draft, and the copies to hash."""
    _, _, _, *lines = draft_text.split(b"\n", 3)
    if not lines:
        return {}, {}
    try:
        body = decode_object(lines[0], what, max_bytes=MAX_DOCUMENT_BYTES, max_depth=MAX_DEPTH)
        copies = {
            name: tuple((at, num_bytes) for at, num_bytes in map(read_integers, rows))
            for name, rows in body.fields("copies").members.items()
        }
        return sections.read(body, max_bytes=MAX_PART_BYTES), copies
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{what} has findings of watches that cannot be parsed: {error}", key=what) from error


def finish(
    draft_text: bytes,
    file: DataFile,
    frozen: DataFile | None = None,
    watches: Sections = MappingProxyType({}),
) -> bytes:
    """Return the part document: the draft, and the facts and findings about its files, sealed."""
    facts, catalog, starts = draft_text.split(b"\n", 3)[:3]
    files = [one for one in (file, frozen) if one is not None]
    sizes = [[one.num_bytes, one.chunk_bytes] for one in files]
    members = {"file": sizes[0], "frozen": sizes[1] if frozen else None, **sections.members(watches)}
    hashes = [dumps(one.hashes) for one in files]
    return seal(b"\n".join((facts[:-1] + b"," + dumps(members)[1:], catalog, starts, *hashes)))


def differ_in_watches_only(own: bytes, other: bytes, what: str) -> bool:
    """Return True if two part documents describe the same files of the same save."""
    first, second = (replace(parse(text, what), watches={}) for text in (own, other))
    return first == second


def parse(document: bytes, what: str) -> Part:
    """Parse a part; its catalog and starts are parsed at the first use."""
    head, *lines = unseal_lines(document, what)
    body = decode_object(head, what, max_bytes=MAX_DOCUMENT_BYTES, max_depth=MAX_DEPTH)
    parse_body = VERSIONS.parser(body, what)
    try:
        return parse_body(body, lines, what)
    except (Corrupt, ValueError) as error:
        raise Corrupt(f"{what} is sealed but is not a valid part: {error}", key=what) from error


def _parse_v1(body: Fields, lines: list[bytes], what: str) -> Part:
    # Hashes and starts are not in the body: a commit needs those of no rank, and would spend most of its time
    # on decoding them.
    sizes = [body.integers("file", max_items=2)]
    if "frozen" in body:
        sizes.append(body.integers("frozen", max_items=2))
    catalog_digest = body.text("catalog", pattern=HASH)
    if len(lines) != 2 + len(sizes):
        raise ValueError(f"it has {max(0, len(lines) - 2)} lines of hashes for {len(sizes)} files")
    catalog, starts, *hashes = lines
    if digest(catalog) != catalog_digest:
        raise ValueError("its catalog does not match its digest")
    if not _has_form_of_integers(starts):
        raise ValueError("its starts are not an array of integers")
    file, *frozen = map(_file, sizes, hashes)
    world_size = body.integer("world_size", at_least=1, at_most=MAX_RANKS)
    return Part(
        run=body.text("run", pattern=RUN_ID),
        step=body.integer("step", at_most=MAX_STEP),
        attempt=body.integer("attempt", at_most=MAX_ATTEMPT),
        rank=body.integer("rank", at_most=world_size - 1),
        world_size=world_size,
        ancestors=read_ancestors(body),
        values=body.fields("values").members,
        own=tuple(map(_own, body.array("own"))),
        file=file,
        frozen=frozen[0] if frozen else None,
        catalog_digest=catalog_digest,
        catalog_text=catalog,
        starts_text=starts,
        what=what,
        watches=sections.read(body, max_bytes=MAX_PART_BYTES),
    )


def _has_form_of_integers(line: bytes) -> bool:
    # The integers are checked at their first use. A commit only counts them, for which digits with one comma
    # between two of them are enough.
    items = line[1:-1]
    if line[:1] + line[-1:] != b"[]" or items.translate(None, b"0123456789,"):
        return False
    return not items or b",," not in b",%b," % items


def read_ancestors(body: Fields) -> Ancestors:
    """Return the ancestors in a document."""
    found: list[CheckpointId] = []
    for row in body.array("ancestors"):
        attempt, step = columns(row, 2, "an ancestor")
        found += map(
            CheckpointId,
            read_integers([attempt], at_most=MAX_ATTEMPT),
            read_integers([step], at_most=MAX_STEP),
        )
    return tuple(found)


def _own(row: Any) -> tuple[str, str, tuple[int, ...], int]:
    name, dtype, shape, start = columns(row, 4, "a tensor")
    check_facts(name, dtype)
    (start,) = read_integers([start])
    sizes = read_integers(shape, max_items=MAX_DIMS)
    check_size(name, dtype, sizes)
    return name, dtype, sizes, start


def _file(sizes: tuple[int, ...], line: bytes) -> DataFile:
    num_bytes, chunk_bytes = columns(list(sizes), 2, "the sizes of a file")
    if chunk_bytes <= 0:
        raise ValueError(f"a file of {num_bytes} bytes in chunks of {chunk_bytes}")
    num_chunks = -(-num_bytes // chunk_bytes)
    if line[:1] + line[-1:] != b'""' or len(line) != DIGITS * num_chunks + 2:
        raise ValueError(f"{len(line) - 2} digits of chunk hashes for {num_chunks} chunks")
    return DataFile(num_bytes, chunk_bytes, line[1:-1].decode("ascii"))


VERSIONS = Versions("holdfast-part", written=1, parsers={1: _parse_v1})
