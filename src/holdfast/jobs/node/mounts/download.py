"""Copies what a URL names to this machine, once: each object whole, sizes compared, a kill costs one file."""

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

from holdfast.errors import InvalidInput, NotFound, RetryLater
from holdfast.jobs.node.plan import write_whole
from holdfast.quantity import plural, say_bytes
from holdfast.store import Entry, Store, open_store
from holdfast.store.address import parse_address
from holdfast.writeback.ownership import FOLDER

_AT_ONCE = 8  # files
_BLOCK_BYTES = 16 << 20
_TELL_S = 5.0
_ASK_LIMIT = "10"  # seconds


def is_anything(url: str) -> bool:
    """Whether there is an object at a URL, or below it.

    Raises:
        RetryLater: the store does not answer, or not to us.
        InvalidInput: it is no URL of a store.
    """
    address = parse_address(url)
    if address.option("timeout") is None:
        address = dataclasses.replace(address, options=(*address.options, ("timeout", _ASK_LIMIT)))
    if next(iter(open_store(address.url).list()), None) is not None:
        return True
    parent, name = _split(address.url)
    return parent is not None and parent.size(name) is not None


def download(
    url: str, to: Path, *, tell: Callable[[str], None], is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Have at a path what a URL names: a folder of all that is below it, or one file.

    What is there already, from an attempt that was ended, is not copied again; a copy that was finished is
    left as it is, so that all attempts of a job see the same.

    Args:
        url: prefix of a bucket, or one object.
        to: where it is to be.
        tell: is told how far it is.
        is_wanted: asked again and again; once it says no, nothing more is begun.

    Raises:
        NotFound: there is nothing.
        InvalidInput: names of objects that no folder can hold.
        RetryLater: the store or the disk failed, or it is not wanted any more; call again to go on.

    Blocks: until all of it is there.
    """
    done = to.with_name(f"{to.name}.done")
    if done.exists():
        return
    Download(url, to, tell, is_wanted).run()
    write_whole(done, json.dumps({"url": url, "unix_s": time.time()}))


class Download:
    """One copy that is being made; see `download`."""

    def __init__(
        self, url: str, to: Path, tell: Callable[[str], None], is_wanted: Callable[[], bool]
    ) -> None:
        self._url, self._to, self._tell, self._is_wanted = url, to, tell, is_wanted
        self._beside = to.with_name(f"{to.name}.part")
        self._num_bytes = 0
        self._told_s = time.monotonic()
        self._counting = threading.Lock()

    def run(self) -> None:
        """Do it."""
        began_s = time.monotonic()
        store, entries, is_one = self._listed()
        total = sum(entry.num_bytes for entry in entries)
        targets = {entry.name: self._to if is_one else self._to / entry.name for entry in entries}
        shutil.rmtree(self._beside, ignore_errors=True)  # what a kill has left half done
        try:
            self._beside.mkdir(parents=True)
            (self._to.parent if is_one else self._to).mkdir(exist_ok=True)
            missing = [entry for entry in entries if _size(targets[entry.name]) != entry.num_bytes]
            self._check_room(sum(entry.num_bytes for entry in missing))
            self._bring(store, missing, targets, total)
            self._check(entries, targets)
        except OSError as error:
            if isinstance(error, NotFound):
                raise
            raise RetryLater(f"{self._url} could not be copied to {self._to}: {error}.") from error
        finally:
            shutil.rmtree(self._beside, ignore_errors=True)
        seconds = time.monotonic() - began_s
        self._tell(
            f"copied {self._url} to {self._to}: {plural(len(entries), 'file')}, "
            f"{say_bytes(total)}, {seconds:.1f} s"
        )

    def _listed(self) -> tuple[Store, list[Entry], bool]:
        """The store, its objects, and whether the URL means just that one object."""
        store = open_store(self._url)
        entries = [entry for entry in store.list() if not entry.name.startswith(f"{FOLDER}/")]
        if entries:
            _check_names([entry.name for entry in entries], self._url)
            return store, entries, False
        parent, name = _split(self._url)
        num_bytes = parent.size(name) if parent is not None else None
        if parent is None or num_bytes is None:
            raise NotFound(f"There is nothing at {store.url}.")
        return parent, [Entry(name, num_bytes)], True

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._beside).free
        if num_bytes > free:
            raise RetryLater(
                f"{self._url} holds {say_bytes(num_bytes)} that are not in {self._to} yet, and its disk has "
                f"{say_bytes(free)} free. Nothing was copied. Make room, or mount instead of copying."
            )

    def _bring(self, store: Store, entries: list[Entry], targets: dict[str, Path], total: int) -> None:
        self._num_bytes = total - sum(entry.num_bytes for entry in entries)
        with ThreadPoolExecutor(_AT_ONCE, "holdfast-copy") as pool:
            jobs = [
                pool.submit(self._bring_one, store, entry, self._beside / str(number), targets[entry.name])
                for number, entry in enumerate(entries)
            ]
            try:
                while (left := wait(jobs, timeout=0.2).not_done) and not _failed(jobs):
                    self._check_wanted()
                    self._say_how_far(len(entries), len(left), total)
                for job in jobs:
                    if job.done():
                        job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise RetryLater(f"The copy of {self._url} was given up: nobody waits for it any more.")

    def _say_how_far(self, num_files: int, num_left: int, total: int) -> None:
        if time.monotonic() - self._told_s >= _TELL_S:
            self._told_s = time.monotonic()
            self._tell(
                f"copying {self._url}: {num_files - num_left} of {plural(num_files, 'file')}, "
                f"{say_bytes(self._num_bytes)} of {say_bytes(total)}"
            )

    def _bring_one(self, store: Store, entry: Entry, beside: Path, target: Path) -> None:
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
            os.fsync(file.fileno())  # what has its name must be whole, also after a loss of power
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.replace(target)

    def _check(self, entries: list[Entry], targets: dict[str, Path]) -> None:
        for entry in entries:
            found = _size(targets[entry.name])
            if found != entry.num_bytes:
                raise RetryLater(
                    f"{targets[entry.name]} has {found} bytes after it was copied, and {entry.name} of "
                    f"{self._url} has {entry.num_bytes}: one of them was changed meanwhile."
                )


def _failed(jobs: list) -> bool:
    return any(job.done() and job.exception() is not None for job in jobs)


def _check_names(names: list[str], url: str) -> None:
    """Refuse an object that has the name of a folder on the way to another one."""
    files = set(names)
    for name in names:
        for parent in Path(name).parents:
            if str(parent) in files:
                raise InvalidInput(
                    f"{url} holds {str(parent)!r} and {name!r}: no folder can hold both. Copy a prefix that "
                    "has only one of them."
                )


def _split(url: str) -> tuple[Store | None, str]:
    """The store around an object and the object's name in it; no store for a whole bucket."""
    address = parse_address(url)
    parent, _, name = address.prefix.rpartition("/")
    if not name:
        return None, ""
    return open_store(dataclasses.replace(address, prefix=parent).url), name


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else None
