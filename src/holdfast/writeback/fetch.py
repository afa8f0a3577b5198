"""Fetches what the bucket has into the directory, when it is mounted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast.errors import NotFound, RetryLater
from holdfast.format.hashes import digest
from holdfast.killpoint import kill_point
from holdfast.quantity import say_bytes
from holdfast.store import Entry, Store
from holdfast.writeback.files import Fingerprint
from holdfast.writeback.journal import FOLDER
from holdfast.writeback.order import Sent

_AT_ONCE = 8  # files
_BLOCK_BYTES = 16 << 20
_COMPARED_BYTES = 1 << 20  # up to here a local copy is compared with the object, not only its size


@dataclass(frozen=True, slots=True)
class Fetched:
    """One object that is in the directory now."""

    name: str
    sent: Sent


class Fetch:
    """Brings objects into a directory, each whole or not at all.

    Args:
        store: the bucket.
        directory: the write-back directory.
    """

    def __init__(self, store: Store, directory: Path) -> None:
        self._store, self._directory = store, directory
        self._folder = directory / FOLDER / "fetching"
        shutil.rmtree(self._folder, ignore_errors=True)  # what a kill left of an earlier one
        self._folder.mkdir()

    def listed(self, skips: Callable[[str], bool]) -> list[Entry]:
        """The objects that belong into the directory."""
        return [entry for entry in self._store.list() if not skips(entry.name)]

    def check_room(self, entries: list[Entry]) -> None:
        """Refuse before half of it is there.

        Raises:
            RetryLater: the disk has not enough room.
        """
        wanted, free = sum(entry.num_bytes for entry in entries), shutil.disk_usage(self._folder).free
        if wanted > free:
            raise RetryLater(
                f"{self._store.url} holds {say_bytes(wanted)} that are not in {self._directory}, and "
                f"its disk has {say_bytes(free)} free. Nothing was fetched. Make room, mount a smaller "
                "prefix, or mount without fetching."
            )

    def is_same(self, entry: Entry, sent: Sent) -> bool:
        """Whether the object still is what we sent or fetched, as far as size, or if small bytes, tell."""
        if entry.num_bytes != sent.fingerprint.num_bytes:
            return False
        if entry.num_bytes > _COMPARED_BYTES:
            return True
        with suppress(NotFound):
            return digest(self._store.get(entry.name)) == sent.digest
        return False

    def bring(self, entries: list[Entry], replaced: dict[str, Fingerprint]) -> Iterator[Fetched]:
        """Fetch objects, several at once.

        Args:
            entries: the objects.
            replaced: files that may be replaced if they still look so; others that are there are left alone.

        Raises:
            RetryLater: the store failed, or the disk is full; what was yielded is there.
        """
        with ThreadPoolExecutor(_AT_ONCE, "holdfast-fetch") as pool:
            jobs = [
                pool.submit(self._bring, number, entry, replaced.get(entry.name))
                for number, entry in enumerate(entries)
            ]
            try:
                for job in jobs:
                    if (fetched := job.result()) is not None:
                        yield fetched
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _bring(self, number: int, entry: Entry, replaced: Fingerprint | None) -> Fetched | None:
        temp, target = self._folder / str(number), self._directory / entry.name
        try:
            found = self._download(entry, temp)
            kill_point("writeback.fetched")
            return self._place(
                temp, target, Fetched(entry.name, Sent(Fingerprint.of(temp.stat()), found)), replaced
            )
        except NotFound:
            return None  # deleted since it was listed
        except OSError as error:
            raise RetryLater(f"{target} could not be fetched: {error.strerror}.", key=entry.name) from error
        finally:
            temp.unlink(missing_ok=True)

    def _place(
        self, temp: Path, target: Path, fetched: Fetched, replaced: Fingerprint | None
    ) -> Fetched | None:
        """Give the file its name; None if the job has written one of this name meanwhile, which is newer."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RetryLater(
                f"{self._store.url} holds {fetched.name!r} and an object that has the name of a directory on "
                "the way to it: no directory can hold both. Delete or rename one of them in the bucket."
            ) from error
        if replaced is None:
            try:
                target.hardlink_to(temp)  # unlike a rename, leaves alone what is there
            except FileExistsError:
                return None
        elif not target.is_file() or Fingerprint.of(target.stat()) != replaced:
            return None
        else:
            temp.replace(target)
        return fetched

    def _download(self, entry: Entry, temp: Path) -> str:
        """Write an object to a file; returns its digest."""
        hashed = xxhash.xxh3_128()
        room = memoryview(bytearray(min(_BLOCK_BYTES, entry.num_bytes)))
        with temp.open("wb") as file:
            for start in range(0, entry.num_bytes, _BLOCK_BYTES):
                block = room[: min(_BLOCK_BYTES, entry.num_bytes - start)]
                self._store.read_into(entry.name, start, block)
                hashed.update(block)
                file.write(block)
        # A time of long ago enough that any later write shows.
        past_ns = time.time_ns() - 1_000_000_000
        os.utime(temp, ns=(past_ns, past_ns))
        return hashed.hexdigest()
