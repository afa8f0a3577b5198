"""Removal of a directory whose files are all in the bucket."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from holdfast.errors import NotFound
from holdfast.jobs.writeback.files import scan
from holdfast.jobs.writeback.journal import FOLDER, Journal
from holdfast.jobs.writeback.mount import lifecycle_lock
from holdfast.jobs.writeback.reconciliation import ASIDE
from holdfast.jobs.writeback.status import has_uploader, status_of


def remove_uploaded(directory: str | os.PathLike[str]) -> bool:
    """Remove a write-back directory from this machine, if its bucket has everything in it.

    The files of the bucket stay. A directory that has any other file stays too, for example an unfinished
    one, or one that was set aside.

    Returns:
        False if the directory has an uploader, or another file.

    Raises:
        RetryLater: the journal cannot be read now.
        Corrupt: the journal is damaged.
        OSError: the directory cannot be removed.

    Blocks: for a scan of all files.
    """
    root = Path(directory).absolute()
    folder, removed = root / FOLDER, root.with_name(f".{root.name}.removed")
    if removed.exists():  # left by a kill
        shutil.rmtree(removed)
    if not folder.is_dir():
        return not root.exists()
    with lifecycle_lock(folder):
        if has_uploader(root) or not _is_all_sent(root):
            return False
        # At once: to an uploader, a missing file of which the journal lists an upload is a deleted one.
        root.rename(removed)
    shutil.rmtree(removed)
    return True


def _is_all_sent(root: Path) -> bool:
    try:
        if not status_of(root).is_drained or (root / FOLDER / ASIDE).exists():
            return False
    except NotFound:
        return False
    journal = Journal(root, is_reader=True)
    try:
        sent = journal.load().sent
    finally:
        journal.close()
    found, others = scan(root, lambda name: name.split("/")[0] == FOLDER)
    return not others and all(one.name in sent for one in found)
