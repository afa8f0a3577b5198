"""Copy of a bucket's prefix or object to this machine. Resumes after a kill."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from holdfast.checkpoint.store import ObjectInfo, Store, open_store
from holdfast.checkpoint.store.address import parse_address
from holdfast.errors import HoldfastError, InvalidInput, NotFound, RetryLater
from holdfast.jobs.node.mounts.mount_records import MountSpec
from holdfast.jobs.node.roles import log_line
from holdfast.jobs.writeback.journal import FOLDER
from holdfast.system.linux.files import write_atomic
from holdfast.system.units import format_bytes, plural

_REPORT_S = 5.0
_TIMEOUT_S = "10"


def exists(url: str) -> bool:
    """Return True if an object exists at a URL or below it."""
    address = parse_address(url)
    if address.option("timeout") is None:
        address = replace(address, options=(*address.options, ("timeout", _TIMEOUT_S)))
    if next(iter(open_store(address.url).list()), None) is not None:
        return True
    return _one(address.url) is not None


class BucketCopy:
    """Copy of a bucket's prefix or object, mounted for a job. It stays for all attempts, without a server."""

    is_open = True

    def __init__(self, spec: MountSpec) -> None:
        self._url, self._to = spec.place, Path(spec.path)

    def open(self, is_wanted: Callable[[], bool]) -> None:
        """Download an object, or a folder with all objects below a URL.

        Files of an interrupted download are not copied again. A complete download is left unchanged, so that
        all attempts of a job see the same files.
        """
        url, to = self._url, self._to
        done = to.with_name(f"{to.name}.done")
        if done.exists():
            return
        began_s = time.monotonic()
        store, entries, is_one = _listed(url)
        folder = to.with_name(f"{to.name}.objects") if is_one else to
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _download_missing(url, store, entries, folder, is_wanted)
            if is_one:
                (folder / entries[0].name).replace(to)
                shutil.rmtree(folder)
            write_atomic(done, json.dumps({"url": url, "unix_s": time.time()}))
        except OSError as error:
            if isinstance(error, HoldfastError):
                raise
            raise RetryLater(f"Cannot copy {url} to {to}: {error}.") from error
        total = format_bytes(sum(entry.num_bytes for entry in entries))
        seconds = time.monotonic() - began_s
        log_line(f"copied {url} to {to}: {plural(len(entries), 'file')}, {total}, {seconds:.1f} s")

    def close(self) -> None:
        """Do nothing: the copy stays."""


def _listed(url: str) -> tuple[Store, list[ObjectInfo], bool]:
    """Return the store, its objects, and whether the URL names exactly one object."""
    store = open_store(url)
    entries = [entry for entry in store.list() if not entry.name.startswith(f"{FOLDER}/")]
    if entries:
        _check_names([entry.name for entry in entries], url)
        return store, entries, False
    if (found := _one(url)) is None:
        raise NotFound(f"Nothing exists at {store.url}.")
    return found[0], [found[1]], True


def _download_missing(
    url: str, store: Store, entries: list[ObjectInfo], folder: Path, is_wanted: Callable[[], bool]
) -> None:
    """Download the objects that are not in a folder yet, and check the sizes of all."""
    # Here, because it takes as long to import as all else, and a launch needs only `exists`.
    from holdfast.jobs.writeback.files import Fingerprint
    from holdfast.jobs.writeback.reconciliation import Download

    present = {entry.name: _size(folder / entry.name) for entry in entries}
    missing = [entry for entry in entries if present[entry.name] != entry.num_bytes]
    total, left = (sum(entry.num_bytes for entry in found) for found in (entries, missing))
    counting, num_bytes, logged_s = threading.Lock(), total - left, time.monotonic()
    num_done = len(entries) - len(missing)

    def on_block(size: int) -> None:
        nonlocal num_bytes, logged_s
        if not is_wanted():
            raise RetryLater(f"The copy of {url} was stopped: no process waits for it any more.")
        with counting:
            num_bytes += size
            if time.monotonic() - logged_s >= _REPORT_S:
                logged_s = time.monotonic()
                files = f"{num_done} of {plural(len(entries), 'file')}"
                log_line(f"copying {url}: {files}, {format_bytes(num_bytes)} of {format_bytes(total)}")

    beside = folder.with_name(f"{folder.name}.part")
    copy = Download(store, folder, folder=beside, on_block=on_block)
    try:
        copy.check_size(missing, None)
        replaced = {
            entry.name: Fingerprint.of((folder / entry.name).stat())
            for entry in missing
            if present[entry.name] is not None
        }
        for _ in copy.fetch(missing, replaced):
            num_done += 1
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    for entry in entries:
        if (found := _size(folder / entry.name)) != entry.num_bytes:
            raise RetryLater(
                f"{folder / entry.name} has {found} bytes after the copy, but {entry.name} of {url} has "
                f"{entry.num_bytes}: one of them changed in the meantime."
            )


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


def _one(url: str) -> tuple[Store, ObjectInfo] | None:
    """Return the object that a URL names, with the store of its folder; None if it is missing."""
    address = parse_address(url)
    parent, _, name = address.prefix.rpartition("/")
    if not name:
        return None  # a whole bucket
    store = open_store(replace(address, prefix=parent).url)
    num_bytes = store.size(name)
    return None if num_bytes is None else (store, ObjectInfo(name, num_bytes))


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else None
