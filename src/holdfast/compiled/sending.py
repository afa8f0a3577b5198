"""Sends what torch.compile has made to home: new files only, in packs, within a bound of bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from holdfast.compiled import directory as directories
from holdfast.compiled.directory import Directory
from holdfast.compiled.facts import Facts
from holdfast.compiled.index import (
    FOLDER,
    Index,
    IndexName,
    Packed,
    PackName,
    document,
    index_name,
    pack_name,
    parse_name,
)
from holdfast.compiled.loading import listed_paths, read_indices
from holdfast.compiled.packs import divide, pack
from holdfast.errors import Conflict
from holdfast.killpoint import kill_point
from holdfast.quantity import say_bytes
from holdfast.store import Store

PACK_BYTES = 8 << 20
"""Files are packed up to so many bytes: what is in memory at once, and what a kill can cost."""


@dataclass(slots=True)
class Sent:
    """What a sender did: files and bytes that are in home now, and what it could not do, in words."""

    num_files: int = 0
    num_bytes: int = 0
    problem: str | None = None


@final
class Sender:
    """Sends the files of one directory for one rank of one attempt.

    Args:
        store: the home.
        key: of this machine.
        facts: behind the key.
        attempt: that sends.
        rank: of the sender, one on each host.
        limit_bytes: what all compile caches of the home may take together.
        turn: 0 for the sender that may make room; the others give it a head start, since most of what they
            have it has too.
        known: paths that home has already.
        lacking: paths that home lists and could not give.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        facts: Facts,
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
        self._files: tuple[Packed, ...] = ()  # of our own index
        self._number = 0
        self._has_tidied = False
        self._waited = False

    def send(self, directory: Directory, *, is_last: bool = False, is_ended: Callable[[], bool]) -> Sent:
        """Send what is new since the last call.

        After each pack home has an index that lists it, so a kill costs one pack.

        Args:
            directory: of torch.compile.
            is_last: there will be no other call, so nobody is given a head start.
            is_ended: asked between packs; if true, the rest is not sent.

        Raises:
            RetryLater: the store failed; what was sent is known, and the rest is sent by the next call.
            OSError: the directory cannot be read.
        """
        sent = Sent()
        new = self._new(directory)
        if not new:
            return sent
        if self._turn > 0 and not self._waited and not is_last:
            self._waited = True
            return sent
        if self._turn > 0 or self._number == 0:
            indices, _ = read_indices(self._store, self._key, self._facts)
            self._known |= set(listed_paths(indices)) - self._lacking
            new = self._new(directory)
        in_order = sorted(
            new.items(), key=lambda one: (one[1] > PACK_BYTES, one[0])
        )  # what is quick goes first
        for paths in divide(in_order, PACK_BYTES):
            if is_ended() or not self._send_pack(directory, paths, sent):
                break
        return sent

    def _new(self, directory: Directory) -> dict[str, int]:
        files = directories.whole_files(directory)
        return {path: size for path, size in files.items() if path not in self._known}

    def _send_pack(self, directory: Directory, paths: list[str], sent: Sent) -> bool:
        read = ((path, directories.read_whole(directory, path)) for path in paths)
        whole, files = pack({path: data for path, data in read if data is not None})
        if not files:
            return True
        index = Index(self._attempt, self._rank, self._number + 1, self._facts, (*self._files, *files))
        text = document(index)
        if not self._make_room(len(whole) + len(text)):
            sent.problem = (
                f"The compile caches in {self._store.url} may take {say_bytes(self._limit_bytes)}, and that "
                "is full: what else was compiled stays on this machine, and is compiled anew on another. "
                'compile_cache="..." raises the bound.'
            )
            return False
        with contextlib.suppress(Conflict):  # another host of this attempt has sent the same bytes
            self._store.put(pack_name(self._key, self._attempt, files[0].pack), whole, if_absent=True)
        kill_point("compiled.packed")
        self._store.put(index_name(self._key, self._attempt, self._rank, index.number), text)
        if self._number:
            self._store.delete(index_name(self._key, self._attempt, self._rank, self._number))
        self._files, self._number = index.files, index.number
        self._known |= {file.path for file in files}
        sent.num_files += len(files)
        sent.num_bytes += len(whole)
        return True

    # -- the bound -------------------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> bool:
        """Whether there is room for so many bytes, after removing what the oldest attempts have sent."""
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
    """Packs of older attempts that no index lists: their sender was killed between the two."""
    told = [(name, parse_name(name)) for name in names]
    indexed = {(one.key, one.attempt) for _, one in told if isinstance(one, IndexName)}
    return [
        name
        for name, one in told
        if isinstance(one, PackName) and one.attempt < attempt and (one.key, one.attempt) not in indexed
    ]


def _by_age(names: dict[str, int], attempt: int) -> list[list[str]]:
    """What each older attempt has sent, the oldest first; indices before the packs that they list."""
    older: dict[tuple[int, str], list[str]] = {}
    for name in sorted(names, key=lambda one: (one.endswith(".pack"), one)):
        told = parse_name(name)
        if told is not None and told.attempt < attempt:
            older.setdefault((told.attempt, told.key), []).append(name)
    return [older[found] for found in sorted(older)]
