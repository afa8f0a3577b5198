"""Download of a bucket's objects into a directory: files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.store import ObjectInfo, Store
from holdfast.errors import InvalidInput, NotFound, RetryLater
from holdfast.jobs.writeback.files import Fingerprint
from holdfast.jobs.writeback.journal import FOLDER
from holdfast.jobs.writeback.upload_queue import Sent
from holdfast.system.failpoint import failpoint
from holdfast.system.units import format_bytes

_AT_ONCE = 8  # files
_BLOCK_BYTES = 16 << 20
_COMPARED_BYTES = 1 << 20  # up to this size, a local copy is compared with the object by digest


class Download:
    """Download of objects into a directory. Each file appears whole or not at all.

    Unfinished files are in `folder`, on the same disk. `on_block` is called with the size of each block, in
    any thread; an error of it ends the download.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        *,
        folder: Path | None = None,
        on_block: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._store, self._directory, self._on_block = store, directory, on_block
        self._folder = folder or directory / FOLDER / "fetching"
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a kill
        self._folder.mkdir()

    def check_size(self, entries: list[ObjectInfo], max_bytes: int | None) -> None:
        """Raise if objects are too large together, before anything is downloaded."""
        wanted, free = sum(entry.num_bytes for entry in entries), shutil.disk_usage(self._folder).free
        if max_bytes is not None and wanted > max_bytes:
            raise InvalidInput(
                f"{self._store.url} holds {format_bytes(wanted)} that are not in {self._directory}, which is "
                f"more than its limit of {format_bytes(max_bytes)}. Nothing was downloaded. Mount a smaller "
                "prefix, or raise the limit."
            )
        if wanted > free:
            raise RetryLater(
                f"{self._store.url} holds {format_bytes(wanted)} that are not in {self._directory}, but only "
                f"{format_bytes(free)} are free on its disk. Nothing was downloaded. Free some space, use "
                "a smaller prefix, or mount without downloading everything."
            )

    def is_same(self, entry: ObjectInfo, sent: Sent) -> bool:
        """Return True if an object has the size and, unless it is large, the digest of the last sync."""
        if entry.num_bytes != sent.fingerprint.num_bytes:
            return False
        if entry.num_bytes > _COMPARED_BYTES:
            return True
        with suppress(NotFound):
            return digest(self._store.get(entry.name)) == sent.digest
        return False

    def fetch(
        self, entries: list[ObjectInfo], replaced: Mapping[str, Fingerprint]
    ) -> Iterator[tuple[str, Sent]]:
        """Download objects, several at once, and yield their names and states.

        Of existing files, only those in `replaced` that have not changed are replaced.
        """
        with ThreadPoolExecutor(_AT_ONCE, "holdfast-fetch") as pool:
            jobs = [
                pool.submit(self._fetch_one, number, entry, replaced.get(entry.name))
                for number, entry in enumerate(entries)
            ]
            try:
                for job in jobs:
                    if (fetched := job.result()) is not None:
                        yield fetched
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _fetch_one(
        self, number: int, entry: ObjectInfo, replaced: Fingerprint | None
    ) -> tuple[str, Sent] | None:
        temp, target = self._folder / str(number), self._directory / entry.name
        try:
            found = self._download(entry, temp)
            failpoint("writeback.fetched")
            sent = Sent(Fingerprint.of(temp.stat()), found)
            return (entry.name, sent) if self._place(temp, target, entry.name, replaced) else None
        except NotFound:
            return None  # deleted since the listing
        except OSError as error:
            raise RetryLater(f"Cannot download {target}: {error.strerror}.", key=entry.name) from error
        finally:
            temp.unlink(missing_ok=True)

    def _place(self, temp: Path, target: Path, name: str, replaced: Fingerprint | None) -> bool:
        """Move a file into place. Return False if the job has created one meanwhile, which is newer."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise RetryLater(
                f"{self._store.url} holds {name!r} and an object with the name of one of its parent "
                "directories: no file system can hold both. Delete or rename one of them in the bucket."
            ) from error
        if replaced is None:
            try:
                target.hardlink_to(temp)  # unlike a rename, fails if the name exists
            except FileExistsError:
                return False
            return True
        if not target.is_file() or Fingerprint.of(target.stat()) != replaced:
            return False
        temp.replace(target)
        return True

    def _download(self, entry: ObjectInfo, temp: Path) -> str:
        hashed = xxhash.xxh3_128()
        room = memoryview(bytearray(min(_BLOCK_BYTES, entry.num_bytes)))
        with temp.open("wb") as file:
            for start in range(0, entry.num_bytes, _BLOCK_BYTES):
                block = room[: min(_BLOCK_BYTES, entry.num_bytes - start)]
                self._store.read_into(entry.name, start, block)
                hashed.update(block)
                file.write(block)
                self._on_block(len(block))
            file.flush()
            os.fsync(file.fileno())  # a file with its final name must be complete, even after a power loss
        # A time far enough in the past that any later write changes it.
        past_ns = time.time_ns() - 1_000_000_000
        os.utime(temp, ns=(past_ns, past_ns))
        return hashed.hexdigest()
