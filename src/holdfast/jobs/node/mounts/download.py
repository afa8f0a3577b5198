"""Copy of a bucket's prefix or object to this machine. Resumes after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from holdfast.checkpoint.store import ObjectInfo, Store, open_store
from holdfast.checkpoint.store.address import parse_address
from holdfast.errors import InvalidInput, NotFound, RetryLater
from holdfast.jobs.writeback.ownership import FOLDER
from holdfast.system.linux.files import write_atomic
from holdfast.system.units import format_bytes, plural

_AT_ONCE = 8  # files
_BLOCK_BYTES = 16 << 20
_REPORT_S = 5.0
_TIMEOUT_S = "10"


def exists(url: str) -> bool:
    """Return True if an object exists at a URL or below it.

    Raises:
        RetryLater: the store does not answer, or denies access.
        InvalidInput: the URL is not one of a store.
    """
    address = parse_address(url)
    if address.option("timeout") is None:
        address = dataclasses.replace(address, options=(*address.options, ("timeout", _TIMEOUT_S)))
    if next(iter(open_store(address.url).list()), None) is not None:
        return True
    parent, name = _split(address.url)
    return parent is not None and parent.size(name) is not None


def download(
    url: str, to: Path, *, log: Callable[[str], None], is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Download an object, or a folder with all objects below a URL, to a path.

    Files of an interrupted download are not copied again. A complete download is left unchanged, so that all
    attempts of a job see the same files.

    Args:
        url: prefix of a bucket, or one object.
        log: called with progress messages.
        is_wanted: polled, and stops the download by returning False.

    Raises:
        NotFound: nothing exists at the URL.
        InvalidInput: the names of two objects cannot coexist in a folder.
        RetryLater: the store or the disk failed, or the download was stopped. Call again to continue.

    Blocks: until the download is complete.
    """
    done = to.with_name(f"{to.name}.done")
    if done.exists():
        return
    BucketCopy(url, to, log, is_wanted).run()
    write_atomic(done, json.dumps({"url": url, "unix_s": time.time()}))


class BucketCopy:
    """Download in progress; see `download`."""

    def __init__(self, url: str, to: Path, log: Callable[[str], None], is_wanted: Callable[[], bool]) -> None:
        self._url, self._to, self._log, self._is_wanted = url, to, log, is_wanted
        self._beside = to.with_name(f"{to.name}.part")
        self._num_bytes = 0
        self._logged_s = time.monotonic()
        self._counting = threading.Lock()

    def run(self) -> None:
        """Run the download."""
        began_s = time.monotonic()
        store, entries, is_one = self._listed()
        total = sum(entry.num_bytes for entry in entries)
        targets = {entry.name: self._to if is_one else self._to / entry.name for entry in entries}
        shutil.rmtree(self._beside, ignore_errors=True)  # left by a kill
        try:
            self._beside.mkdir(parents=True)
            (self._to.parent if is_one else self._to).mkdir(exist_ok=True)
            missing = [entry for entry in entries if _size(targets[entry.name]) != entry.num_bytes]
            self._check_room(sum(entry.num_bytes for entry in missing))
            self._download_all(store, missing, targets, total)
            self._check(entries, targets)
        except OSError as error:
            if isinstance(error, NotFound):
                raise
            raise RetryLater(f"Cannot copy {self._url} to {self._to}: {error}.") from error
        finally:
            shutil.rmtree(self._beside, ignore_errors=True)
        seconds = time.monotonic() - began_s
        self._log(
            f"copied {self._url} to {self._to}: {plural(len(entries), 'file')}, "
            f"{format_bytes(total)}, {seconds:.1f} s"
        )

    def _listed(self) -> tuple[Store, list[ObjectInfo], bool]:
        """Return the store, its objects, and whether the URL names exactly one object."""
        store = open_store(self._url)
        entries = [entry for entry in store.list() if not entry.name.startswith(f"{FOLDER}/")]
        if entries:
            _check_names([entry.name for entry in entries], self._url)
            return store, entries, False
        parent, name = _split(self._url)
        num_bytes = parent.size(name) if parent is not None else None
        if parent is None or num_bytes is None:
            raise NotFound(f"Nothing exists at {store.url}.")
        return parent, [ObjectInfo(name, num_bytes)], True

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._beside).free
        if num_bytes > free:
            raise RetryLater(
                f"{self._url} holds {format_bytes(num_bytes)} that are not in {self._to} yet, but only "
                f"{format_bytes(free)} are free on its disk. Nothing was copied. Free space, or use a mount."
            )

    def _download_all(
        self, store: Store, entries: list[ObjectInfo], targets: dict[str, Path], total: int
    ) -> None:
        self._num_bytes = total - sum(entry.num_bytes for entry in entries)
        with ThreadPoolExecutor(_AT_ONCE, "holdfast-copy") as pool:
            jobs = [
                pool.submit(self._download_one, store, entry, self._beside / str(number), targets[entry.name])
                for number, entry in enumerate(entries)
            ]
            try:
                while (left := wait(jobs, timeout=0.2).not_done) and not _failed(jobs):
                    self._check_wanted()
                    self._log_progress(len(entries), len(left), total)
                for job in jobs:
                    if job.done():
                        job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise RetryLater(f"The copy of {self._url} was stopped: no process waits for it any more.")

    def _log_progress(self, num_files: int, num_left: int, total: int) -> None:
        if time.monotonic() - self._logged_s >= _REPORT_S:
            self._logged_s = time.monotonic()
            self._log(
                f"copying {self._url}: {num_files - num_left} of {plural(num_files, 'file')}, "
                f"{format_bytes(self._num_bytes)} of {format_bytes(total)}"
            )

    def _download_one(self, store: Store, entry: ObjectInfo, beside: Path, target: Path) -> None:
        room = memoryview(bytearray(min(_BLOCK_BYTES, entry.num_bytes)))
        with beside.open("wb") as file:
            for start in range(0, entry.num_bytes, _BLOCK_BYTES):
                self._check_wanted()
                block = room[: min(_BLOCK_BYTES, entry.num_bytes - start)]
                store.read_into(entry.name, start, block)
                file.write(block)
                with self._counting:
                    self._num_bytes += len(block)
            file.flush()
            os.fsync(file.fileno())  # a file with its final name must be complete, even after a power loss
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.replace(target)

    def _check(self, entries: list[ObjectInfo], targets: dict[str, Path]) -> None:
        for entry in entries:
            found = _size(targets[entry.name])
            if found != entry.num_bytes:
                raise RetryLater(
                    f"{targets[entry.name]} has {found} bytes after the copy, but {entry.name} of "
                    f"{self._url} has {entry.num_bytes}: one of them changed in the meantime."
                )


def _failed(jobs: list) -> bool:
    return any(job.done() and job.exception() is not None for job in jobs)


def _check_names(names: list[str], url: str) -> None:
    """Check that no object has the name of another one's folder."""
    files = set(names)
    for name in names:
        for parent in Path(name).parents:
            if str(parent) in files:
                raise InvalidInput(
                    f"{url} holds {str(parent)!r} and {name!r}: no folder can hold both. Copy a prefix that "
                    "has only one of them."
                )


def _split(url: str) -> tuple[Store | None, str]:
    """Return an object's parent store and its name there, or None for a whole bucket."""
    address = parse_address(url)
    parent, _, name = address.prefix.rpartition("/")
    if not name:
        return None, ""
    return open_store(dataclasses.replace(address, prefix=parent).url), name


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else None
