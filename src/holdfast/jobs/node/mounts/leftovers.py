"""Leftovers: files that a killed attempt has not uploaded, sent and logged before the next attempt begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.errors import Conflict, NotFound, RetryLater
from holdfast.jobs.node.mounts.cache_mount import mount_write_back
from holdfast.jobs.node.mounts.mount_spec import MountSpec
from holdfast.jobs.writeback import status_of
from holdfast.jobs.writeback.journal import FOLDER, Journal
from holdfast.jobs.writeback.reconciliation import ASIDE
from holdfast.jobs.writeback.status import FENCED, DirectoryStatus, has_uploader

_LOOK_S = 0.2
_SCAN_S = 2.0
"""Interval for scanning the directory, to find out whether its uploads fail."""
_PATIENCE_S = 300.0
"""Time limit for uploads that fail, as for a mount."""


def send_leftovers(
    spec: MountSpec,
    owner: str,
    attempt: int,
    *,
    is_wanted: Callable[[], bool],
    log: Callable[[str], None],
) -> None:
    """Upload what an earlier attempt has left in a write-back directory, and end its uploader.

    It is uploaded in the name of that attempt. So if a newer one has mounted the place elsewhere, nothing is,
    and the next mount sets these files aside.

    Args:
        attempt: attempt that begins.
        is_wanted: polled, and stops the call by returning False.
        log: called with progress messages.

    Blocks: until everything is uploaded.
    """
    path = Path(spec.path)
    before = mounting_attempt(path, owner)
    if before is None or before >= attempt:
        return
    status = status_of(path)
    if status.is_settled and not status.is_running:
        return
    log(f"uploading what attempt {before} has left in {path} to {spec.place}")
    try:
        held = mount_write_back(spec, owner, before, is_wanted, fetch=False)
    except Conflict as error:
        log(f"{error} What it has left stays in {path}.")
        return
    held.close()
    status = _wait_until_sent(spec, path, is_wanted)
    if not status.is_settled and status.uploader != FENCED:
        raise RetryLater(f"{status.summary()}, from attempt {before}: {status.trouble or status.uploader}.")


def aside_folder(spec: MountSpec) -> Path | None:
    """Return the folder of a mount's files that were set aside, or None."""
    path = Path(spec.path) / FOLDER / ASIDE
    return path if path.is_dir() else None


def mounting_attempt(path: Path, owner: str) -> int | None:
    """Return an owner's newest attempt that has mounted a directory, or None."""
    with suppress(NotFound):
        journal = Journal(path, is_reader=True)
        try:
            if journal.get("owner") == owner:
                return int(journal.get("attempt", "0"))
        finally:
            journal.close()
    return None


def _wait_until_sent(spec: MountSpec, path: Path, is_wanted: Callable[[], bool]) -> DirectoryStatus:
    failing_s: float | None = None
    scan_s = time.monotonic() + _SCAN_S
    while has_uploader(path):
        if not is_wanted():
            raise RetryLater(f"The upload to {spec.place} was stopped: no process waits for it any more.")
        time.sleep(_LOOK_S)
        if time.monotonic() < scan_s:
            continue
        status = status_of(path)
        scan_s = time.monotonic() + _SCAN_S
        failing_s = (failing_s or time.monotonic()) if status.trouble else None
        if failing_s is not None and time.monotonic() > failing_s + _PATIENCE_S:
            return status
    return status_of(path)


def log_line(text: str) -> None:
    """Write a line to the log of the node that started this process."""
    sys.stdout.write(f"holdfast: {time.strftime('%F %T')} {text}\n")
    sys.stdout.flush()
