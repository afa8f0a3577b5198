"""Compiled files between home and a local directory: downloads, verified, and uploads within a size limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import final

from msgspec import Struct

from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, HoldfastError, NotFound
from holdfast.system.failpoint import failpoint
from holdfast.system.units import format_bytes
from holdfast.watch.compiled import directory as directories
from holdfast.watch.compiled.build_environment import BuildEnvironment, format_difference
from holdfast.watch.compiled.directory import Directory
from holdfast.watch.compiled.index import (
    FOLDER,
    CacheIndex,
    IndexName,
    PackedFile,
    divide,
    document,
    folder_of,
    index_name,
    newest,
    pack,
    pack_name,
    parse,
    parse_name,
    unpack,
)

MAX_INDICES = 256  # most indices to read, newest first
_READS_AT_ONCE = 4


class DownloadResult(Struct):
    """Result of a download."""

    there: set[str] = set()  # paths that exist in the directory now
    lacking: set[str] = set()  # paths in an index that could not be downloaded
    num_placed: int = 0  # downloaded files
    num_bytes: int = 0  # of these
    problems: list[str] = []


def read_indices(store: Store, key: str, facts: BuildEnvironment) -> tuple[list[CacheIndex], list[str]]:
    """Read the indices of a key, newest attempt first, and the errors of unreadable ones.

    Of each writer the newest readable index counts.
    """
    names = (parse_name(entry.name) for entry in store.list(folder_of(key)))
    writers = newest(name for name in names if isinstance(name, IndexName))[:MAX_INDICES]
    found: list[CacheIndex] = []
    problems: list[str] = []
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        for index, wrong in pool.map(lambda numbers: _first_good(store, facts, numbers), writers):
            found += [index] if index is not None else []
            problems += wrong
    return found, problems


def _first_good(
    store: Store, facts: BuildEnvironment, names: list[IndexName]
) -> tuple[CacheIndex | None, list[str]]:
    problems = []
    for parts in names:
        name = index_name(parts.key, parts.attempt, parts.rank, parts.number)
        try:
            index = parse(store.get(name), name)
        except NotFound:
            continue  # just replaced by its writer
        except HoldfastError as error:
            problems.append(str(error))
            continue
        if index.facts == facts:
            return index, problems
        difference = format_difference(facts, index.facts)
        problems.append(f"{name} is for another environment: it differs in {difference}.")
    return None, problems


def load(
    store: Store, key: str, facts: BuildEnvironment, directory: Directory, *, limit_s: float
) -> DownloadResult:
    """Download every file of a key that the directory lacks.

    A file with a wrong hash is skipped, and an older copy used, if one exists.

    Args:
        limit_s: time limit, after which no further pack is downloaded.
    """
    deadline = time.monotonic() + limit_s
    loaded = DownloadResult()
    indices, loaded.problems = read_indices(store, key, facts)
    for index in indices:
        wanted: dict[str, list[PackedFile]] = {}  # by pack
        for file in index.files:
            if file.path not in loaded.there:
                if directories.has(directory, file.path, file.num_bytes):
                    loaded.there.add(file.path)
                else:
                    wanted.setdefault(pack_name(key, index.attempt, file.pack), []).append(file)
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            fetching = [pool.submit(_fetch, store, *one, directory, deadline) for one in wanted.items()]
        for placed, problems in (one.result() for one in fetching):
            loaded.there |= {file.path for file in placed}
            loaded.num_placed += len(placed)
            loaded.num_bytes += sum(file.num_bytes for file in placed)
            loaded.problems += problems
    loaded.lacking = set(_listed_paths(indices)) - loaded.there
    return loaded


def _fetch(
    store: Store, name: str, files: list[PackedFile], directory: Directory, deadline: float
) -> tuple[list[PackedFile], list[str]]:
    """Place the files of a pack. Return the files that exist now, and the errors of the others."""
    if time.monotonic() > deadline:
        return [], [f"{name} was not downloaded in time."]
    try:
        whole = store.get(name)
    except HoldfastError as error:
        return [], [str(error)]
    placed: list[PackedFile] = []
    problems: list[str] = []
    for file in files:
        try:
            directories.place(directory, file.path, unpack(whole, file))
            placed.append(file)
        except (HoldfastError, OSError) as error:
            problems.append(str(error))
    return placed, problems


def _listed_paths(indices: Iterable[CacheIndex]) -> Iterator[str]:
    return (file.path for index in indices for file in index.files)


# -- to home -------------------------------------------------------------------------------------------------

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
    _files: tuple[PackedFile, ...] = ()  # of its own index
    _number: int = 0
    _has_tidied: bool = False
    _has_waited: bool = False

    def upload(
        self, directory: Directory, *, is_last: bool = False, is_ended: Callable[[], bool]
    ) -> UploadResult:
        """Upload the files that are new since the last call. If the store fails, the next call does the rest.

        After each pack, home has an index with it, so a kill costs at most one pack.

        Args:
            is_last: this is the last call, so it does not wait for the first uploader.
            is_ended: checked between packs. If true, the rest is not uploaded.
        """
        result = UploadResult()
        new = self._new(directory)
        if not new:
            return result
        if self.turn > 0 and not self._has_waited and not is_last:
            self._has_waited = True
            return result
        if self.turn > 0 or self._number == 0:
            indices, _ = read_indices(self.store, self.key, self.facts)
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
        whole, files = pack({path: data for path, data in read if data is not None})
        if not files:
            return True
        index = CacheIndex(self.attempt, self.rank, self._number + 1, self.facts, (*self._files, *files))
        text = document(index)
        if not self._make_room(len(whole) + len(text)):
            result.problem = (
                f"The compile caches in {self.store.url} have reached their limit of "
                f"{format_bytes(self.limit_bytes)}. Further compiled code stays on this machine; others "
                "compile it again. Raise the limit with CompileCache(limit=)."
            )
            return False
        with contextlib.suppress(Conflict):  # another host of this attempt uploaded the same bytes
            self.store.put(pack_name(self.key, self.attempt, files[0].pack), whole, if_absent=True)
        failpoint("compiled.packed")
        self.store.put(index_name(self.key, self.attempt, self.rank, index.number), text)
        if self._number:
            self.store.delete(index_name(self.key, self.attempt, self.rank, self._number))
        self._files, self._number = index.files, index.number
        self.known = {*self.known, *(file.path for file in files)}
        result.num_files += len(files)
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
