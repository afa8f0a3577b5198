"""A rank's part: what it wrote and where in its files, their chunk hashes, the rank's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.errors import Corrupt, Unsupported
from holdfast.format import names
from holdfast.format.catalog import Catalog, parse_catalog
from holdfast.format.hashes import chunk_ranges, digest
from holdfast.format.layout import Piece
from holdfast.format.sealed import dumps, loads, seal, unseal_lines

FORMAT, VERSION = "holdfast-part", 1

Ancestors = tuple[tuple[int, int], ...]
"""(attempt, step) of each checkpoint that an attempt before was restored from, oldest first."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """Size and chunk hashes of a data file."""

    num_bytes: int
    chunk_bytes: int
    chunks: tuple[str, ...]  # xxh3-128 of each chunk, in order


@dataclass(frozen=True)
class Part:
    """What one rank wrote into one checkpoint.

    Its pieces are those that the catalog says this rank wrote, in the order of the catalog, and after them
    `own`: tensors of which every rank has its own.
    """

    run: str
    step: int
    attempt: int
    rank: int
    world_size: int
    ancestors: Ancestors
    values: dict[str, Any]  # tagged JSON, see values.decode
    own: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, start
    catalog_starts: tuple[int, ...]
    file: DataFile
    frozen: DataFile | None  # the second data file, with the frozen tensors
    catalog_digest: str
    catalog_text: bytes
    what: str  # name of its document, for errors

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog, parsed when first asked for.

        Raises:
            Corrupt: it cannot be read.
        """
        return parse_catalog(self.catalog_text, self.what)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, in the order of `starts`.

        Raises:
            Corrupt: there are not as many as places for them.
        """
        shared = [
            Piece(name, tensor.dtype, tensor.shape, box.offsets, box.lengths, frozen=tensor.frozen)
            for name, tensor, box in self.catalog.written_by(self.rank)
        ]
        if len(shared) != len(self.catalog_starts):
            message = (
                f"{self.what} says where {len(self.catalog_starts)} pieces are, but its catalog says that "
                f"rank {self.rank} wrote {len(shared)}."
            )
            raise Corrupt(message, step=self.step, rank=self.rank, key=self.what)
        own = (Piece.whole(name, dtype, shape, per_rank=True) for name, dtype, shape, _ in self.own)
        return (*shared, *own)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Byte offset of each piece in its data file."""
        return (*self.catalog_starts, *(start for *_, start in self.own))

    @property
    def files(self) -> dict[str, DataFile]:
        """The data files by the names of their objects."""
        found = {self.file_name(frozen=False): self.file}
        return found if self.frozen is None else found | {self.file_name(frozen=True): self.frozen}

    def file_name(self, *, frozen: bool) -> str:
        """Name of the object that holds the frozen pieces, or the others."""
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
) -> bytes:
    """A part without its file facts: what the trainer knows when a save is staged.

    Args:
        values: tagged JSON, see `values.encode`.
        own: name, dtype, shape and start of each tensor of which every rank has its own.
        starts: of the pieces that the catalog says this rank wrote, in its order.
        catalog: as `catalog.catalog_text` makes it.
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
            "ancestors": ancestors,
            "values": values,
            "own": own,
            "starts": starts,
            "catalog": digest(catalog),
        }
    )
    return facts + b"\n" + catalog


def finish(draft_text: bytes, file: DataFile, frozen: DataFile | None = None) -> bytes:
    """The part document: the draft, the files' facts, sealed."""
    facts, _, catalog = draft_text.partition(b"\n")
    files = dumps({"file": _file_body(file), "frozen": None if frozen is None else _file_body(frozen)})
    return seal(facts[:-1] + b"," + files[1:] + b"\n" + catalog)


def _file_body(file: DataFile) -> dict[str, Any]:
    return {"bytes": file.num_bytes, "chunk_bytes": file.chunk_bytes, "chunks": "".join(file.chunks)}


def parse(document: bytes, what: str) -> Part:
    """The part in a document; its catalog is parsed only when asked for.

    Raises:
        Corrupt: its bytes have changed, or it is not a part.
        Unsupported: written by a newer format.
    """
    head, *catalogs = unseal_lines(document, what)
    body = loads(head, what)
    check_kind(body, FORMAT, VERSION, what)
    try:
        (catalog,) = catalogs
        return _parse(body, catalog, what)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{what} is sealed but lacks what a part holds: {error!r}.", key=what) from error


def _parse(body: dict[str, Any], catalog: bytes, what: str) -> Part:
    if digest(catalog) != body["catalog"]:
        message = "its catalog is not the one that it names"
        raise ValueError(message)
    return Part(
        run=body["run"],
        step=body["step"],
        attempt=body["attempt"],
        rank=body["rank"],
        world_size=body["world_size"],
        ancestors=tuple((attempt, step) for attempt, step in body["ancestors"]),
        values=body["values"],
        own=tuple((name, dtype, tuple(shape), start) for name, dtype, shape, start in body["own"]),
        catalog_starts=tuple(body["starts"]),
        file=_file(body["file"]),
        frozen=None if body["frozen"] is None else _file(body["frozen"]),
        catalog_digest=body["catalog"],
        catalog_text=catalog,
        what=what,
    )


def _file(body: dict[str, Any]) -> DataFile:
    digests = body["chunks"]
    num_chunks = sum(1 for _ in chunk_ranges(body["bytes"], body["chunk_bytes"]))
    if len(digests) != 32 * num_chunks:
        raise ValueError(f"{len(digests)} digits of chunk hashes for {num_chunks} chunks")
    chunks = tuple(digests[i : i + 32] for i in range(0, len(digests), 32))
    return DataFile(body["bytes"], body["chunk_bytes"], chunks)


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
