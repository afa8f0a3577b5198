"""Index of an attempt's uploads: files with hashes, and their positions in packs; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.catalog import columns
from holdfast.checkpoint.format.hashes import DIGITS
from holdfast.checkpoint.format.limits import HASH, MAX_ATTEMPT, MAX_RANKS
from holdfast.checkpoint.format.sealed import Versions, dumps, seal, unseal
from holdfast.checkpoint.store.contract import check_name
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import Fields, is_text, read_integers, shown
from holdfast.watch.compiled.build_environment import BuildEnvironment

FOLDER = "compiled/"
"""Prefix of all objects of compile caches."""
MAX_FILE_BYTES = 256 << 20
"""Largest file to upload."""
MAX_INDEX_BYTES = 64 << 20
MAX_PATH_CHARS = 1024

_KEY = r"compiled/([0-9a-f]{32})/"
_A = r"a([0-9]{4}|[1-9][0-9]{4,8})"
_INDEX = re.compile(rf"{_KEY}{_A}-rank-([0-9]{{5}}|[1-9][0-9]{{5,6}})-([0-9]{{4}}|[1-9][0-9]{{4,8}})\.json")
_PACK = re.compile(rf"{_KEY}{_A}-([0-9a-f]{{32}})\.pack")


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file: its path, size and hash, and its position in a pack.

    `pack` is the pack's hash. The compressed file is the `packed_bytes` from `offset` on.
    """

    path: str
    num_bytes: int
    hash: str
    pack: str
    offset: int
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class CacheIndex:
    """Uploads of one rank of an attempt so far. A greater `number` replaces the smaller ones."""

    attempt: int
    rank: int
    number: int
    facts: BuildEnvironment
    files: tuple[PackedFile, ...]


@dataclass(frozen=True, slots=True, order=True)
class IndexName:
    """Parts of an index's name. The newest index of a key is the greatest."""

    attempt: int
    rank: int
    number: int
    key: str


@dataclass(frozen=True, slots=True)
class PackName:
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
    body = {
        **VERSIONS.header,
        "attempt": index.attempt,
        "rank": index.rank,
        "number": index.number,
        "facts": index.facts,
        "packs": packs,
        "files": rows,
    }
    return seal(dumps(body))


def parse(text: bytes, name: str) -> CacheIndex:
    """Parse the document of an index, and check every path.

    Raises:
        Corrupt: the bytes have changed, the name is wrong, or a path leads out of a directory.
        Unsupported: a newer format wrote it.
    """
    body = unseal(text, name, max_bytes=MAX_INDEX_BYTES)
    return VERSIONS.parser(body, name)(body, name)


def _parse_v1(body: Fields, name: str) -> CacheIndex:
    attempt = body.integer("attempt", at_most=MAX_ATTEMPT)
    rank = body.integer("rank", at_most=MAX_RANKS - 1)
    number = body.integer("number")
    try:
        packs = body.texts("packs", max_chars=DIGITS)
        facts = {fact: body.fields("facts").text(fact) for fact in body.fields("facts").members}
        files = tuple(_file(row, packs) for row in body.array("files"))
    except (Corrupt, ValueError) as error:
        raise Corrupt(
            f"{name} is sealed but not a valid index of compiled files: {error}.", key=name
        ) from error
    index = CacheIndex(attempt, rank, number, facts, files)
    parsed = parse_name(name)
    if not isinstance(parsed, IndexName) or (parsed.attempt, parsed.rank, parsed.number) != (
        index.attempt,
        index.rank,
        index.number,
    ):
        raise Corrupt(
            f"{name} is the index of attempt {index.attempt}, rank {index.rank}, under a wrong name.",
            key=name,
        )
    return index


VERSIONS = Versions("holdfast-compiled", written=1, parsers={1: _parse_v1})


def _file(row: Any, packs: Sequence[str]) -> PackedFile:
    path, num_bytes, file_hash, pack, offset, packed_bytes = columns(row, 6, "a file")
    read_integers([num_bytes, packed_bytes], at_most=MAX_FILE_BYTES)
    read_integers([pack], at_most=len(packs) - 1)
    read_integers([offset])
    if type(file_hash) is not str or not HASH.fullmatch(file_hash):
        raise ValueError(f"{shown(path)} has the hash {shown(file_hash)}")
    return PackedFile(check_path(path), num_bytes, file_hash, packs[int(pack)], offset, packed_bytes)


def check_path(path: str) -> str:
    """Return a path, if it stays inside its directory.

    Raises:
        InvalidInput: it leads out of the directory, or is not a valid file name.
    """
    if not isinstance(path, str) or len(path) > MAX_PATH_CHARS or "\\" in path or not is_text(path):
        raise InvalidInput(f"{shown(path)} is not a valid path in a compile cache.")
    return check_name(path)


def newest(names: Iterable[IndexName]) -> list[list[IndexName]]:
    """Group indices by writer, the greatest number first. Writers of the newest attempt come first."""
    writers: dict[tuple[str, int, int], list[IndexName]] = {}
    for name in sorted(names, reverse=True):
        writers.setdefault((name.key, name.attempt, name.rank), []).append(name)
    return list(writers.values())
