"""Compiled files between home and a local directory: their index and packs, downloads and uploads."""

from __future__ import annotations

import contextlib
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Annotated, NamedTuple, final

from msgspec import Meta, Struct

from holdfast.checkpoint.format.hashes import DIGITS, digest
from holdfast.checkpoint.format.limits import AttemptNumber, Hash, Rank
from holdfast.checkpoint.format.sealed import Versions, seal
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, HoldfastError, InvalidInput, NotFound
from holdfast.system.documents import MAX_TEXT_CHARS, Count, shown, to_plain
from holdfast.system.failpoint import failpoint
from holdfast.system.units import divide, format_bytes
from holdfast.watch.compiled import directory as directories
from holdfast.watch.compiled.directory import FOLDER, MAX_FILE_BYTES, BuildEnvironment, Directory

MAX_INDEX_BYTES = 64 << 20

_KEY = r"compiled/([0-9a-f]{32})/"
_A = r"a([0-9]{4}|[1-9][0-9]{4,8})"
_INDEX = re.compile(rf"{_KEY}{_A}-rank-([0-9]{{5}}|[1-9][0-9]{{5,6}})-([0-9]{{4}}|[1-9][0-9]{{4,8}})\.json")
_PACK = re.compile(rf"{_KEY}{_A}-([0-9a-f]{{32}})\.pack")


_FileBytes = Annotated[int, Meta(ge=0, le=MAX_FILE_BYTES)]


class PackedFile(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file of an index: its path, size and hash, and its position in a pack."""

    path: str
    num_bytes: _FileBytes
    hash: Hash
    pack: Count  # number of the pack in the index; it has the compressed file from `offset` on
    offset: Count
    packed_bytes: _FileBytes

    def __post_init__(self) -> None:
        directories.check_path(self.path)


class CacheIndex(Struct, frozen=True):
    """Uploads of one rank of an attempt so far. A greater `number` replaces the smaller ones."""

    attempt: AttemptNumber
    rank: Rank
    number: Count
    facts: dict[str, Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]]  # a `BuildEnvironment`
    packs: tuple[Annotated[str, Meta(max_length=DIGITS)], ...]  # their hashes
    files: tuple[PackedFile, ...]

    def __post_init__(self) -> None:
        for file in self.files:
            if file.pack >= len(self.packs):
                raise InvalidInput(f"{shown(file.path)} is in the pack {file.pack} of {len(self.packs)}")


class IndexName(NamedTuple):
    """Parts of an index's name. The newest index of a key is the greatest."""

    attempt: int
    rank: int
    number: int
    key: str

    def __str__(self) -> str:
        return f"{FOLDER}{self.key}/a{self.attempt:04d}-rank-{self.rank:05d}-{self.number:04d}.json"


class PackName(NamedTuple):
    """Parts of a pack's name."""

    key: str
    attempt: int
    hash: str

    def __str__(self) -> str:
        return f"{FOLDER}{self.key}/a{self.attempt:04d}-{self.hash}.pack"


def parse_name(name: str) -> IndexName | PackName | None:
    """Parse the name of an object. Return None for objects that are neither index nor pack."""
    if found := _INDEX.fullmatch(name):
        return IndexName(int(found[2]), int(found[3]), int(found[4]), found[1])
    if found := _PACK.fullmatch(name):
        return PackName(found[1], int(found[2]), found[3])
    return None


VERSIONS = Versions("holdfast-compiled", written=1, types={1: CacheIndex})


def document(index: CacheIndex) -> bytes:
    """Return the sealed document of an index."""
    return seal(VERSIONS.line(to_plain(index)))


def parse(text: bytes, name: str) -> CacheIndex:
    """Parse the document of an index, and check every path."""
    try:
        found = VERSIONS.unseal(text, name, max_bytes=MAX_INDEX_BYTES)
    except Corrupt as error:
        raise Corrupt(
            f"{name} is sealed but not a valid index of compiled files: {str(error).rstrip('.')}.", key=name
        ) from error
    parsed = parse_name(name)
    if not isinstance(parsed, IndexName) or parsed[:3] != (found.attempt, found.rank, found.number):
        message = f"{name} is the index of attempt {found.attempt}, rank {found.rank}, under a wrong name."
        raise Corrupt(message, key=name)
    return found


def newest(names: Iterable[IndexName]) -> list[list[IndexName]]:
    """Group the indices of a key by writer, the newest attempt first, and the greatest number of each."""
    ordered = sorted(names, reverse=True)
    return [list(group) for _, group in groupby(ordered, lambda name: (name.attempt, name.rank))]


def pack(files: Mapping[str, bytes], number: int = 0) -> tuple[bytes, tuple[PackedFile, ...]]:
    """Pack files into one object, and return their positions in it; `number` is that of the pack."""
    whole, packed_files = bytearray(), []
    for path, data in sorted(files.items()):
        packed = zlib.compress(data)
        packed_files.append(PackedFile(path, len(data), digest(data), number, len(whole), len(packed)))
        whole += packed
    return bytes(whole), tuple(packed_files)


def unpack(whole: bytes, file: PackedFile, name: str) -> bytes:
    """Return the contents of a file in the pack of a name, verified against its hash."""
    stretch = memoryview(whole)[file.offset : file.offset + file.packed_bytes]
    try:
        # One byte more than allowed: longer data are detected without decompressing all of them.
        data = zlib.decompressobj().decompress(stretch, file.num_bytes + 1)
    except zlib.error as error:
        raise Corrupt(f"{file.path} in {name} is damaged: {error}.", key=file.path) from error
    if len(data) != file.num_bytes or digest(data) != file.hash:
        raise Corrupt(
            f"{file.path} in {name} is damaged (expected {file.num_bytes} bytes of "
            f"xxh3:{file.hash}, found {len(data)} of xxh3:{digest(data)}).",
            key=file.path,
        )
    return data


MAX_INDICES = 256  # most indices to read, newest first
_READS_AT_ONCE = 4


class DownloadResult(Struct):
    """Result of a download."""

    there: set[str] = set()  # paths that exist in the directory now
    lacking: set[str] = set()  # paths in an index that could not be downloaded
    num_placed: int = 0  # downloaded files
    num_bytes: int = 0  # of these
    problems: list[str] = []


def read_indices(store: Store, key: str, facts: BuildEnvironment, problems: list[str]) -> list[CacheIndex]:
    """Read the indices of a key, newest attempt first, and add the errors of unreadable ones to `problems`.

    Of each writer the newest readable index counts.
    """
    names = (parse_name(entry.name) for entry in store.list(f"{FOLDER}{key}/"))
    writers = newest(name for name in names if isinstance(name, IndexName))[:MAX_INDICES]

    def first_good(numbers: list[IndexName]) -> CacheIndex | None:
        for parts in numbers:
            name = str(parts)
            try:
                index = parse(store.get(name), name)
            except NotFound:
                continue  # just replaced by its writer
            except HoldfastError as error:
                problems.append(str(error))
                continue
            if index.facts == facts:
                return index
            difference = directories.format_difference(facts, index.facts)
            problems.append(f"{name} is for another environment: it differs in {difference}.")
        return None

    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        return [index for index in pool.map(first_good, writers) if index is not None]


def load(
    store: Store, key: str, facts: BuildEnvironment, directory: Directory, *, limit_s: float
) -> DownloadResult:
    """Download every file of a key that the directory lacks.

    A file with a wrong hash is skipped, and an older copy used, if one exists. After `limit_s` no further
    pack is downloaded.
    """
    deadline = time.monotonic() + limit_s
    loaded = DownloadResult()
    indices = read_indices(store, key, facts, loaded.problems)

    def fetch(name: str, files: list[PackedFile]) -> list[PackedFile]:
        """Place the files of a pack, and return those that exist now."""
        if time.monotonic() > deadline:
            loaded.problems.append(f"{name} was not downloaded in time.")
            return []
        placed: list[PackedFile] = []
        try:
            whole = store.get(name)
        except HoldfastError as error:
            loaded.problems.append(str(error))
            return []
        for file in files:
            try:
                directories.place(directory, file.path, unpack(whole, file, name))
                placed.append(file)
            except (HoldfastError, OSError) as error:
                loaded.problems.append(str(error))
        return placed

    for index in indices:
        wanted: dict[str, list[PackedFile]] = {}  # by pack
        for file in index.files:
            if file.path not in loaded.there:
                if directories.has(directory, file.path, file.num_bytes):
                    loaded.there.add(file.path)
                else:
                    name = PackName(key, index.attempt, index.packs[file.pack])
                    wanted.setdefault(str(name), []).append(file)
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            placed = [file for found in pool.map(fetch, wanted, wanted.values()) for file in found]
        loaded.there |= {file.path for file in placed}
        loaded.num_placed += len(placed)
        loaded.num_bytes += sum(file.num_bytes for file in placed)
    loaded.lacking = set(_listed_paths(indices)) - loaded.there
    return loaded


def _listed_paths(indices: Iterable[CacheIndex]) -> Iterator[str]:
    return (file.path for index in indices for file in index.files)


PACK_BYTES = 8 << 20  # target size of a pack: the memory of one upload, and the most that a kill can cost


class UploadResult(Struct):
    """Result of an upload: new files and bytes in home, and a problem, as text."""

    num_files: int = 0
    num_bytes: int = 0
    problem: str | None = None


@final
class CacheUploader(Struct):
    """Uploader of the files of one directory, for one rank of an attempt."""

    store: Store
    key: str
    facts: BuildEnvironment
    attempt: int
    rank: int  # of the uploader, one per host
    limit_bytes: int  # for all compile caches in the home
    turn: int = 0  # 0 may delete old files; others mostly have the same files, and start later
    known: Collection[str] = ()  # paths that home already has
    lacking: Collection[str] = ()  # paths in an index that could not be downloaded
    _packs: tuple[str, ...] = ()  # of its own index
    _files: tuple[PackedFile, ...] = ()
    _number: int = 0
    _has_tidied: bool = False
    _has_waited: bool = False

    def upload(
        self, directory: Directory, *, is_last: bool = False, is_ended: Callable[[], bool]
    ) -> UploadResult:
        """Upload the files that are new since the last call. If the store fails, the next call does the rest.

        After each pack, home has an index with it, so a kill costs at most one pack. The last call does not
        wait for the first uploader. `is_ended` is checked between packs.
        """
        result = UploadResult()
        new = self._new(directory)
        if not new:
            return result
        if self.turn > 0 and not self._has_waited and not is_last:
            self._has_waited = True
            return result
        if self.turn > 0 or self._number == 0:
            indices = read_indices(self.store, self.key, self.facts, [])
            self.known = {*self.known, *(set(_listed_paths(indices)) - set(self.lacking))}
            new = self._new(directory)
        in_order = sorted(new.items(), key=lambda item: (item[1] > PACK_BYTES, item[0]))  # fast uploads first
        for paths in divide(in_order, PACK_BYTES):
            if is_ended() or not self._upload_pack(directory, paths, result):
                break
        return result

    def _new(self, directory: Directory) -> dict[str, int]:
        files = directories.whole_files(directory)
        return {path: size for path, size in files.items() if path not in self.known}

    def _upload_pack(self, directory: Directory, paths: list[str], result: UploadResult) -> bool:
        read = ((path, directories.read_whole(directory, path)) for path in paths)
        whole, packed = pack({path: data for path, data in read if data is not None}, len(self._packs))
        if not packed:
            return True
        packs, files = (*self._packs, digest(whole)), (*self._files, *packed)
        index = CacheIndex(self.attempt, self.rank, self._number + 1, self.facts, packs, files)
        text = document(index)
        if not self._make_room(len(whole) + len(text)):
            result.problem = (
                f"The compile caches in {self.store.url} have reached their limit of "
                f"{format_bytes(self.limit_bytes)}. Further compiled code stays on this machine; others "
                "compile it again. Raise the limit with CompileCache(limit=)."
            )
            return False
        with contextlib.suppress(Conflict):  # another host of this attempt uploaded the same bytes
            self.store.put(str(PackName(self.key, self.attempt, packs[-1])), whole, if_absent=True)
        failpoint("compiled.packed")
        name = IndexName(self.attempt, self.rank, index.number, self.key)
        self.store.put(str(name), text)
        if self._number:
            self.store.delete(str(name._replace(number=self._number)))
        self._packs, self._files, self._number = packs, files, index.number
        self.known = {*self.known, *(file.path for file in packed)}
        result.num_files += len(packed)
        result.num_bytes += len(whole)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Return True if there is room for these bytes, after deleting the oldest attempts' files."""
        sizes = {entry.name: entry.num_bytes for entry in self.store.list(FOLDER)}
        oldest = _by_age(sizes, self.attempt) if self.turn == 0 else []
        if self.turn == 0 and not self._has_tidied:
            self._has_tidied = True
            self.store.sweep(FOLDER)
            # Packs without an index: their uploader was killed in between.
            orphans = [names for names in oldest if names[0].endswith(".pack")]
            self._delete(orphans, sizes)
            oldest = [names for names in oldest if names not in orphans]
        while num_bytes + sum(sizes.values()) > self.limit_bytes:
            if not oldest:
                return False
            self._delete([oldest.pop(0)], sizes)
        return True

    def _delete(self, groups: Iterable[list[str]], sizes: dict[str, int]) -> None:
        for name in (name for names in groups for name in names):
            self.store.delete(name)
            del sizes[name]


def _by_age(names: Iterable[str], attempt: int) -> list[list[str]]:
    """Return the objects of each older attempt, oldest first, indices before their packs."""
    older: dict[tuple[int, str], list[str]] = {}
    for name in sorted(names, key=lambda name: (name.endswith(".pack"), name)):
        parsed = parse_name(name)
        if parsed is not None and parsed.attempt < attempt:
            older.setdefault((parsed.attempt, parsed.key), []).append(name)
    return [older[found] for found in sorted(older)]
