"""Upload of new compiled files to home, in packs, within a size limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict
from holdfast.system.failpoint import failpoint
from holdfast.system.units import format_bytes
from holdfast.watch.compiled import directory as directories
from holdfast.watch.compiled.build_environment import BuildEnvironment
from holdfast.watch.compiled.directory import Directory
from holdfast.watch.compiled.download import listed_paths, read_indices
from holdfast.watch.compiled.index import (
    FOLDER,
    CacheIndex,
    IndexName,
    PackedFile,
    PackName,
    document,
    index_name,
    pack_name,
    parse_name,
)
from holdfast.watch.compiled.packs import divide, pack

PACK_BYTES = 8 << 20
"""Target size of a pack: the memory of one upload, and the most that a kill can cost."""


@dataclass(slots=True)
class UploadResult:
    """Result of an upload: new files and bytes in home, and a problem, as text."""

    num_files: int = 0
    num_bytes: int = 0
    problem: str | None = None


@final
class CacheUploader:
    """Uploader of the files of one directory, for one rank of an attempt.

    Args:
        rank: rank of the uploader, one per host.
        limit_bytes: limit for all compile caches in the home.
        turn: 0 for the uploader that may delete old files. The others start later, since they mostly have the
            same files.
        known: paths that home already has.
        lacking: paths in an index that could not be downloaded.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        facts: BuildEnvironment,
        *,
        attempt: int,
        rank: int,
        limit_bytes: int,
        turn: int = 0,
        known: Collection[str] = (),
        lacking: Collection[str] = (),
    ) -> None:
        self._store = store
        self._key = key
        self._facts = facts
        self._attempt = attempt
        self._rank = rank
        self._limit_bytes = limit_bytes
        self._turn = turn
        self._known = set(known)
        self._lacking = frozenset(lacking)
        self._files: tuple[PackedFile, ...] = ()  # of our own index
        self._number = 0
        self._has_tidied = False
        self._waited = False

    def upload(
        self, directory: Directory, *, is_last: bool = False, is_ended: Callable[[], bool]
    ) -> UploadResult:
        """Upload the files that are new since the last call.

        After each pack, home has an index with it, so a kill costs at most one pack.

        Args:
            is_last: this is the last call, so it does not wait for the first uploader.
            is_ended: checked between packs. If true, the rest is not uploaded.

        Raises:
            RetryLater: the store failed. The next call uploads the rest.
            OSError: the directory cannot be read.
        """
        result = UploadResult()
        new = self._new(directory)
        if not new:
            return result
        if self._turn > 0 and not self._waited and not is_last:
            self._waited = True
            return result
        if self._turn > 0 or self._number == 0:
            indices, _ = read_indices(self._store, self._key, self._facts)
            self._known |= set(listed_paths(indices)) - self._lacking
            new = self._new(directory)
        in_order = sorted(new.items(), key=lambda one: (one[1] > PACK_BYTES, one[0]))  # fast uploads first
        for paths in divide(in_order, PACK_BYTES):
            if is_ended() or not self._upload_pack(directory, paths, result):
                break
        return result

    def _new(self, directory: Directory) -> dict[str, int]:
        files = directories.whole_files(directory)
        return {path: size for path, size in files.items() if path not in self._known}

    def _upload_pack(self, directory: Directory, paths: list[str], result: UploadResult) -> bool:
        read = ((path, directories.read_whole(directory, path)) for path in paths)
        whole, files = pack({path: data for path, data in read if data is not None})
        if not files:
            return True
        index = CacheIndex(self._attempt, self._rank, self._number + 1, self._facts, (*self._files, *files))
        text = document(index)
        if not self._make_room(len(whole) + len(text)):
            result.problem = (
                f"The compile caches in {self._store.url} have reached their limit of "
                f"{format_bytes(self._limit_bytes)}. Further compiled code stays on this machine; others "
                "compile it again. Raise the limit with CompileCache(limit=)."
            )
            return False
        with contextlib.suppress(Conflict):  # another host of this attempt uploaded the same bytes
            self._store.put(pack_name(self._key, self._attempt, files[0].pack), whole, if_absent=True)
        failpoint("compiled.packed")
        self._store.put(index_name(self._key, self._attempt, self._rank, index.number), text)
        if self._number:
            self._store.delete(index_name(self._key, self._attempt, self._rank, self._number))
        self._files, self._number = index.files, index.number
        self._known |= {file.path for file in files}
        result.num_files += len(files)
        result.num_bytes += len(whole)
        return True

    # -- the bound -------------------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> bool:
        """Return True if there is room for these bytes, after deleting the oldest attempts' files."""
        sizes = {entry.name: entry.num_bytes for entry in self._store.list(FOLDER)}
        if self._turn == 0 and not self._has_tidied:
            self._has_tidied = True
            self._store.sweep(FOLDER)
            for name in _orphans(sizes, self._attempt):
                self._store.delete(name)
                del sizes[name]
        oldest = _by_age(sizes, self._attempt) if self._turn == 0 else []
        while num_bytes + sum(sizes.values()) > self._limit_bytes:
            if not oldest:
                return False
            for name in oldest.pop(0):
                self._store.delete(name)
                del sizes[name]
        return True


def _orphans(names: dict[str, int], attempt: int) -> list[str]:
    """Return packs of older attempts without an index: their uploader was killed in between."""
    parsed = [(name, parse_name(name)) for name in names]
    indexed = {(one.key, one.attempt) for _, one in parsed if isinstance(one, IndexName)}
    return [
        name
        for name, one in parsed
        if isinstance(one, PackName) and one.attempt < attempt and (one.key, one.attempt) not in indexed
    ]


def _by_age(names: dict[str, int], attempt: int) -> list[list[str]]:
    """Return the objects of each older attempt, oldest first, indices before their packs."""
    older: dict[tuple[int, str], list[str]] = {}
    for name in sorted(names, key=lambda one: (one.endswith(".pack"), one)):
        parsed = parse_name(name)
        if parsed is not None and parsed.attempt < attempt:
            older.setdefault((parsed.attempt, parsed.key), []).append(name)
    return [older[found] for found in sorted(older)]
