"""Reconciliation of directory, journal and bucket at a mount, where the newest version wins; the download."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.store import ObjectInfo, Store
from holdfast.errors import Conflict, InvalidInput, NotFound, RetryLater
from holdfast.jobs.writeback.config import UploaderConfig
from holdfast.jobs.writeback.files import Fingerprint, scan
from holdfast.jobs.writeback.journal import FOLDER, JournaledQueue
from holdfast.jobs.writeback.upload_queue import Sent, UploadQueue
from holdfast.jobs.writeback.versions import KeptVersions
from holdfast.system.failpoint import failpoint
from holdfast.system.log import get_logger
from holdfast.system.units import format_bytes, plural

_log = get_logger("jobs.writeback")

ASIDE = "set-aside"  # folder for local files that newer ones of the bucket replaced. Nothing deletes them.


def reconcile(
    store: Store, root: Path, config: UploaderConfig, queue: JournaledQueue, versions: KeptVersions
) -> None:
    """Download what the bucket holds, and keep local files that are not uploaded yet.

    If a newer attempt of the owner has mounted the place since this directory was last mounted, the bucket's
    files win. They also win over a file that was never uploaded from here. Files that lose move to `ASIDE`.
    """
    check_newest_attempt(store, config.owner, config.attempt)
    is_behind = _is_behind(store, config, queue)
    download = Download(store, root)
    objects = {entry.name: entry for entry in store.list() if not config.is_excluded(entry.name)}
    found, _ = scan(root, config.is_excluded)
    files = {file.name: file.fingerprint for file in found}
    aside = _files_to_set_aside(queue.order, files, objects, is_behind=is_behind)
    if is_behind:
        queue.set(behind="yes")  # if this is killed, no later mount may take old files for new ones
        numbers = list(queue.order.entries)
        queue.do(lambda order: order.clear())
        for number in numbers:
            versions.drop(number)
    if aside:
        folder = root / FOLDER / ASIDE / time.strftime("%Y%m%d-%H%M%S")
        for name in aside:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                (root / name).rename(folder / name)
        what = f"{plural(len(aside), 'file')} of {root}"
        _log.info(f"{what} had newer versions in the bucket, and moved to {folder}")
    if config.fetch:
        kept = {name: file for name, file in files.items() if name not in aside}
        wanted = _wanted(queue.order, objects, kept, download, is_behind=is_behind)
        download.check_size(wanted, config.fetch_bytes)
        for name, sent in download.fetch(wanted, replaced=kept):
            queue.do(lambda order, name=name, sent=sent: order.mark_downloaded(name, sent))
    queue.set(owner=config.owner, attempt=str(config.attempt), behind="")


def _is_behind(store: Store, config: UploaderConfig, queue: JournaledQueue) -> bool:
    """Return True if a newer attempt mounted the place after this directory was mounted."""
    if not config.owner or queue.get("owner") != config.owner:
        return False
    if queue.get("behind"):
        return True
    # With other directories beside it, their uploads have to be downloaded at each new attempt.
    newest = config.attempt if config.is_shared else newest_attempt(store, config.owner)
    return newest > int(queue.get("attempt", "0"))


def _files_to_set_aside(
    order: UploadQueue, files: Mapping[str, Fingerprint], objects: Collection[str], *, is_behind: bool
) -> set[str]:
    """Return the local files that objects of the bucket replace."""
    aside: set[str] = set()
    for name, file in files.items():
        sent = order.sent.get(name)
        is_sent = sent is not None and sent.fingerprint.matches(file)
        is_unknown = sent is None and not order.has_pending(name) and name not in order.problems
        if (is_behind and not is_sent) or (is_unknown and name in objects):
            aside.add(name)
    return aside


def _wanted(
    order: UploadQueue,
    objects: Mapping[str, ObjectInfo],
    files: Mapping[str, Fingerprint],
    download: Download,
    *,
    is_behind: bool,
) -> list[ObjectInfo]:
    """Return the objects to download, some of them in the place of files."""
    wanted = []
    for name, entry in objects.items():
        sent, file = order.sent.get(name), files.get(name)
        if order.has_pending(name):
            continue
        if file is None:
            is_wanted = sent is None  # otherwise the file was deleted here while no uploader was running
        else:
            is_old = sent is not None and sent.fingerprint.matches(file) and not download.is_same(entry, sent)
            is_wanted = is_behind or is_old
        if is_wanted:
            wanted.append(entry)
    return wanted


def newest_attempt(store: Store, owner: str) -> int:
    """Return the owner's newest attempt that has mounted the place, or 0."""
    names = (entry.name for entry in store.list(f"{FOLDER}/{owner}/"))
    found = [re.fullmatch(r".*/attempt-(\d+)\.json", name) for name in names]
    return max((int(one[1]) for one in found if one), default=0)


def record_attempt(store: Store, owner: str, attempt: int) -> None:
    """Record that an attempt has mounted the place. Each of its nodes may do so."""
    facts = {"owner": owner, "attempt": attempt, "host": socket.gethostname(), "pid": os.getpid()}
    text = json.dumps({**facts, "unix_s": time.time()}).encode()
    with suppress(Conflict):
        store.put(f"{FOLDER}/{owner}/attempt-{attempt:06}.json", text, if_absent=True)


def check_newest_attempt(store: Store, owner: str, attempt: int) -> None:
    """Raise if a newer attempt of the owner has mounted the place."""
    newest = newest_attempt(store, owner) if owner else 0
    if newest > attempt:
        raise Conflict(
            f"{store.url} was mounted by attempt {newest} of {owner}. This is attempt {attempt}, which stops "
            "uploading so that it does not overwrite newer files."
        )


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
