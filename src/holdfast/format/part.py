"""A rank's part: what it wrote and where in its files, their chunk hashes, the rank's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.errors import Corrupt, Unsupported
from holdfast.format import names
from holdfast.format.catalog import Catalog, parse_catalog
from holdfast.format.hashes import DIGITS, digest
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
    hashes: str  # xxh3-128 of each chunk, in order, 32 digits each

    def hash_of(self, chunk: int) -> str:
        """The hash of a chunk."""
        return self.hashes[DIGITS * chunk : DIGITS * (chunk + 1)]


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
    sizes = dumps({"file": _sizes(file), "frozen": None if frozen is None else _sizes(frozen)})
    hashes = [dumps(one.hashes) for one in (file, frozen) if one is not None]
    return seal(b"\n".join((facts[:-1] + b"," + sizes[1:], catalog, *hashes)))


def _sizes(file: DataFile) -> list[int]:
    return [file.num_bytes, file.chunk_bytes]


def parse(document: bytes, what: str) -> Part:
    """The part in a document; its catalog is parsed only when asked for.

    Raises:
        Corrupt: its bytes have changed, or it is not a part.
        Unsupported: written by a newer format.
    """
    head, *lines = unseal_lines(document, what)
    body = loads(head, what)
    check_kind(body, FORMAT, VERSION, what)
    try:
        catalog, *hashes = lines
        return _parse(body, catalog, hashes, what)
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise Corrupt(f"{what} is sealed but lacks what a part holds: {error!r}.", key=what) from error


def _parse(body: dict[str, Any], catalog: bytes, hashes: list[bytes], what: str) -> Part:
    if digest(catalog) != body["catalog"]:
        message = "its catalog is not the one that it names"
        raise ValueError(message)
    # Not as JSON: a commit reads the parts of all ranks, and would spend most of its time on these.
    sizes = [body["file"]] if body["frozen"] is None else [body["file"], body["frozen"]]
    file, *frozen = (_file(size[0], size[1], line) for size, line in zip(sizes, hashes, strict=True))
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
        file=file,
        frozen=frozen[0] if frozen else None,
        catalog_digest=body["catalog"],
        catalog_text=catalog,
        what=what,
    )


def _file(num_bytes: int, chunk_bytes: int, line: bytes) -> DataFile:
    hashes = line.decode()
    num_chunks = -(-num_bytes // chunk_bytes)
    if hashes[:1] + hashes[-1:] != '""' or len(hashes) != DIGITS * num_chunks + 2:
        message = f"{len(hashes) - 2} digits of chunk hashes for {num_chunks} chunks"
        raise ValueError(message)
    return DataFile(num_bytes, chunk_bytes, hashes[1:-1])


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
