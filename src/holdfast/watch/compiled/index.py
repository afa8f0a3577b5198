"""Index of an attempt's uploads: files with hashes, packed into objects, and their positions there; pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from holdfast.checkpoint.format.hashes import DIGITS, digest
from holdfast.checkpoint.format.limits import AttemptNumber, Hash, Rank
from holdfast.checkpoint.format.sealed import Versions, facts_of, seal
from holdfast.checkpoint.store.contract import check_name
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import MAX_TEXT_CHARS, Count, is_text, shown

FOLDER = "compiled/"  # prefix of all objects of compile caches
MAX_FILE_BYTES = 256 << 20  # largest file to upload
MAX_INDEX_BYTES = 64 << 20
MAX_PATH_CHARS = 1024

_KEY = r"compiled/([0-9a-f]{32})/"
_A = r"a([0-9]{4}|[1-9][0-9]{4,8})"
_INDEX = re.compile(rf"{_KEY}{_A}-rank-([0-9]{{5}}|[1-9][0-9]{{5,6}})-([0-9]{{4}}|[1-9][0-9]{{4,8}})\.json")
_PACK = re.compile(rf"{_KEY}{_A}-([0-9a-f]{{32}})\.pack")


class PackedFile(Struct, frozen=True):
    """One file: its path, size and hash, and its position in a pack."""

    path: str
    num_bytes: int
    hash: str
    pack: str  # hash of the pack, which has the compressed file from `offset` on
    offset: int
    packed_bytes: int


_FileBytes = Annotated[int, Meta(ge=0, le=MAX_FILE_BYTES)]
_FileRow = tuple[str, _FileBytes, Hash, Count, Count, _FileBytes]  # a `PackedFile`, its pack by number


class _IndexFacts(Struct, frozen=True):
    """Facts about an index, without its files."""

    attempt: AttemptNumber
    rank: Rank
    number: Count
    facts: dict[str, Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]]  # a `BuildEnvironment`


class _IndexMembers(_IndexFacts, frozen=True):
    """Members of the document of an index."""

    packs: tuple[Annotated[str, Meta(max_length=DIGITS)], ...]
    files: tuple[_FileRow, ...]


class CacheIndex(_IndexFacts, frozen=True):
    """Uploads of one rank of an attempt so far. A greater `number` replaces the smaller ones."""

    files: tuple[PackedFile, ...]


class IndexName(NamedTuple):
    """Parts of an index's name. The newest index of a key is the greatest."""

    attempt: int
    rank: int
    number: int
    key: str


class PackName(NamedTuple):
    """Parts of a pack's name."""

    key: str
    attempt: int
    hash: str


def folder_of(key: str) -> str:
    """Return `compiled/KEY/`."""
    return f"{FOLDER}{key}/"


def index_name(key: str, attempt: int, rank: int, number: int) -> str:
    """Return `compiled/KEY/a0003-rank-00000-0001.json`."""
    return f"{FOLDER}{key}/a{attempt:04d}-rank-{rank:05d}-{number:04d}.json"


def pack_name(key: str, attempt: int, pack_hash: str) -> str:
    """Return `compiled/KEY/a0003-HASH.pack`."""
    return f"{FOLDER}{key}/a{attempt:04d}-{pack_hash}.pack"


def parse_name(name: str) -> IndexName | PackName | None:
    """Parse the name of an object. Return None for objects that are neither index nor pack."""
    if found := _INDEX.fullmatch(name):
        return IndexName(int(found[2]), int(found[3]), int(found[4]), found[1])
    if found := _PACK.fullmatch(name):
        return PackName(found[1], int(found[2]), found[3])
    return None


def document(index: CacheIndex) -> bytes:
    """Return the sealed document of an index."""
    packs = sorted({file.pack for file in index.files})
    rows = [
        [file.path, file.num_bytes, file.hash, packs.index(file.pack), file.offset, file.packed_bytes]
        for file in index.files
    ]
    return seal(VERSIONS.line(facts_of(index, _IndexFacts) | {"packs": packs, "files": rows}))


def parse(text: bytes, name: str) -> CacheIndex:
    """Parse the document of an index, and check every path."""
    try:
        members = VERSIONS.unseal(text, name, max_bytes=MAX_INDEX_BYTES)
        files = tuple(_file(row, members.packs) for row in members.files)
    except (Corrupt, ValueError) as error:
        raise Corrupt(
            f"{name} is sealed but not a valid index of compiled files: {error}.", key=name
        ) from error
    found = CacheIndex(**facts_of(members, _IndexFacts), files=files)
    parsed = parse_name(name)
    if not isinstance(parsed, IndexName) or parsed[:3] != (found.attempt, found.rank, found.number):
        raise Corrupt(
            f"{name} is the index of attempt {found.attempt}, rank {found.rank}, under a wrong name.",
            key=name,
        )
    return found


VERSIONS = Versions("holdfast-compiled", written=1, types={1: _IndexMembers})


def _file(row: _FileRow, packs: Sequence[str]) -> PackedFile:
    path, num_bytes, file_hash, pack, offset, packed_bytes = row
    if pack >= len(packs):
        raise ValueError(f"{shown(path)} is in the pack {pack} of {len(packs)}")
    return PackedFile(check_path(path), num_bytes, file_hash, packs[pack], offset, packed_bytes)


def check_path(path: str) -> str:
    """Return a path, if it stays inside its directory."""
    if not isinstance(path, str) or len(path) > MAX_PATH_CHARS or "\\" in path or not is_text(path):
        raise InvalidInput(f"{shown(path)} is not a valid path in a compile cache.")
    return check_name(path)


def newest(names: Iterable[IndexName]) -> list[list[IndexName]]:
    """Group the indices of a key by writer, the newest attempt first, and the greatest number of each."""
    ordered = sorted(names, reverse=True)
    return [list(group) for _, group in groupby(ordered, lambda name: (name.attempt, name.rank))]


_LEVEL, _LARGE_LEVEL = 6, 1
_LARGE_BYTES = 8 << 20  # precompiled headers; better compression costs more than it saves


def pack(files: Mapping[str, bytes]) -> tuple[bytes, tuple[PackedFile, ...]]:
    """Pack files into one object, and return their positions in it."""
    whole, positions = bytearray(), []
    for path, data in sorted(files.items()):
        packed = zlib.compress(data, _LARGE_LEVEL if len(data) > _LARGE_BYTES else _LEVEL)
        positions.append((path, len(data), digest(data), len(whole), len(packed)))
        whole += packed
    named = digest(whole)
    return bytes(whole), tuple(
        PackedFile(path, num_bytes, file_hash, named, offset, packed_bytes)
        for path, num_bytes, file_hash, offset, packed_bytes in positions
    )


def unpack(whole: bytes, file: PackedFile) -> bytes:
    """Return the contents of a file, verified against its hash."""
    stretch = memoryview(whole)[file.offset : file.offset + file.packed_bytes]
    try:
        # One byte more than allowed: longer data are detected without decompressing all of them.
        data = zlib.decompressobj().decompress(stretch, file.num_bytes + 1)
    except zlib.error as error:
        raise Corrupt(f"{file.path} in the pack {file.pack} is damaged: {error}.", key=file.path) from error
    if len(data) != file.num_bytes or digest(data) != file.hash:
        raise Corrupt(
            f"{file.path} in the pack {file.pack} is damaged (expected {file.num_bytes} bytes of "
            f"xxh3:{file.hash}, found {len(data)} of xxh3:{digest(data)}).",
            key=file.path,
        )
    return data


def divide(sizes: Iterable[tuple[str, int]], max_bytes: int) -> list[list[str]]:
    """Divide paths into groups of at most `max_bytes` each. A larger file has its own group."""
    groups: list[list[str]] = []
    room = 0
    for path, num_bytes in sizes:
        if not groups or num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(path)
        room -= num_bytes
    return groups
