"""Compressed data files of a bucket: their names, and how their plain bytes are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.store.contract import ObjectInfo, ends_early
from holdfast.errors import Corrupt, NotFound, Unsupported

if TYPE_CHECKING:  # imports numpy and zstandard, which only compressed files need
    from holdfast.checkpoint.format.compression import CompressedBlock

_NO_BASE = "none"
_CACHED_BLOCKS = 8  # of 4 MiB: reads begin and end in the middle of blocks
_STORED = re.compile(
    r"(?P<name>.+\.safetensors)\.zst-(?P<size>[1-9]\d{0,15})-"
    rf"(?:{_NO_BASE}|a(?P<attempt>\d{{4,9}})-(?P<step>\d{{8,15}}))"
)


class CompressedFile(Struct, frozen=True):
    """Compressed form of one data file in a bucket."""

    stored: str  # name of its object
    num_bytes: int  # of the object
    plain_bytes: int
    base: str  # name of the data file that its blocks may be differences to


def stored_name(name: str, plain_bytes: int, base: CheckpointId | None) -> str:
    """Return the name of the compressed form of a data file, given the checkpoint of its base."""
    suffix = _NO_BASE if base is None else f"a{base.attempt:04d}-{base.step:08d}"
    return f"{name}.zst-{plain_bytes}-{suffix}"


def load_compression(what: str) -> ModuleType:
    """Import `format.compression`, and raise `Unsupported` if one of its libraries is not installed."""
    try:
        from holdfast.checkpoint.format import compression
    except ImportError as error:
        raise Unsupported(
            f"{what} needs zstandard and numpy. Install them: pip install 'torch-holdfast[remote]'."
        ) from error
    return compression


class CompressedFiles:
    """Compressed files of a bucket, as far as it was listed.

    Args:
        list_folder: lists the objects of a folder, so that `plain` is called with them.
        read: fills memory with the bytes of an object, or of a data file, from an offset on.
    """

    def __init__(
        self, list_folder: Callable[[str], object], read: Callable[[str, int, memoryview], None]
    ) -> None:
        self._list_folder, self._read = list_folder, read
        self.files: dict[str, CompressedFile] = {}  # by the name of the plain file
        self._block = lru_cache(_CACHED_BLOCKS)(self._read_block)
        self._blocks: dict[str, list[CompressedBlock]] = {}  # by the name of the object

    def plain(self, entries: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
        """Yield the entries of a listing, with compressed files as the plain ones; they are remembered."""
        for entry in entries:
            found = _STORED.fullmatch(entry.name)
            if found is None:
                yield entry
                continue
            name, size, base, facts = found["name"], int(found["size"]), _NO_BASE, names.parse(found["name"])
            if facts is not None and found["step"]:
                base = names.base(int(found["step"]), int(found["attempt"]), facts.rank)
            self.files[name] = CompressedFile(entry.name, entry.num_bytes, size, base)
            yield ObjectInfo(name, size)

    def find(self, name: str, *, is_missing: bool = False) -> CompressedFile | None:
        """Return the compressed form of a data file, or None.

        Args:
            is_missing: there is no plain file, so list the folder if the compressed one is unknown.
        """
        kinds = ("data", "base")  # frozen tensors are sent once, as they are
        if is_missing and name not in self.files and any(names.parse_record(kind, name) for kind in kinds):
            self._list_folder(name.rpartition("/")[0] + "/")
        return self.files.get(name)

    def read_into(self, name: str, file: CompressedFile, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the plain bytes of a file.

        Raises:
            Corrupt: they are damaged, or lack their base.
            Unsupported: a library is not installed.
        """
        size, end = load_compression(name).BLOCK_BYTES, offset + len(buffer)
        if end > file.plain_bytes:
            raise ends_early(name, name, file.plain_bytes, offset, len(buffer))
        for number in range(offset // size, -(-end // size)):
            plain, at = self._block(file, number), number * size
            start, stop = max(at, offset), min(at + size, end)
            buffer[start - offset : stop - offset] = plain[start - at : stop - at]

    def _read_block(self, file: CompressedFile, number: int) -> memoryview:
        compression = load_compression(file.stored)
        if (blocks := self._blocks.get(file.stored)) is None:
            index = bytearray(min(compression.index_bytes(file.plain_bytes), file.num_bytes))
            self._read(file.stored, file.num_bytes - len(index), memoryview(index))
            blocks = compression.read_index(index, file.plain_bytes, file.num_bytes, file.stored)
            self._blocks[file.stored] = blocks
        block, at = blocks[number], number * compression.BLOCK_BYTES
        data = memoryview(bytearray(block.num_bytes))
        self._read(file.stored, block.start, data)
        num_bytes = min(compression.BLOCK_BYTES, file.plain_bytes - at)
        base = memoryview(bytearray(num_bytes)) if block.needs_base else None
        if base is not None:
            try:
                self._read(file.base, at, base)
            except NotFound as error:
                message = f"{file.stored} consists of differences to {file.base}, which is missing."
                raise Corrupt(message, key=file.stored) from error
        return compression.decompress(data, block, num_bytes, base, file.stored)

    def unused_bases(self, listed: Iterable[ObjectInfo], attempt: int) -> list[str]:
        """Return the bases in a listing of all objects that no file in it, and none to come, refers to.

        A keeper of `attempt` sends differences to the newest base of its rank only, which is of that attempt.
        """
        found = [entry.name for entry in listed]
        needed = {file.base for name in found if (file := self.files.get(name))}
        bases = {name: facts for name in found if (facts := names.parse_record("base", name))}
        newest: dict[int, CheckpointId] = {}
        for facts in bases.values():
            newest[facts.rank] = max(facts.checkpoint_id, newest.get(facts.rank, facts.checkpoint_id))
        return [
            name
            for name, facts in bases.items()
            if name not in needed and (facts.attempt < attempt or facts.checkpoint_id < newest[facts.rank])
        ]
