"""Reconciliation of directory, journal and bucket at a mount: the newest version of each file wins."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.store import ObjectInfo, Store
from holdfast.errors import Conflict
from holdfast.jobs.writeback.config import UploaderConfig
from holdfast.jobs.writeback.download import Download
from holdfast.jobs.writeback.files import Fingerprint, scan
from holdfast.jobs.writeback.journal import FOLDER, JournaledQueue
from holdfast.jobs.writeback.upload_queue import UploadQueue
from holdfast.jobs.writeback.versions import KeptVersions
from holdfast.system.log import get_logger
from holdfast.system.units import plural

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
