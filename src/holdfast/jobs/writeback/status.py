"""Upload status of a directory, from its journal and a scan of every file.

The uploader is not consulted, so a dead or lagging one cannot hide files. A file counts as uploaded only if
it has not changed since, and is not open for writing.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.errors import NotFound, RetryLater
from holdfast.jobs.writeback.config import EXCLUDED, is_excluded
from holdfast.jobs.writeback.files import ScannedFile, is_open_now, scan
from holdfast.jobs.writeback.journal import FOLDER, Journal
from holdfast.jobs.writeback.upload_queue import UploadQueue
from holdfast.system.documents import decode, read_as, to_plain
from holdfast.system.linux.files import opened
from holdfast.system.linux.locks import try_flock
from holdfast.system.units import format_bytes, format_duration, plural

STARTING, ALIVE, ENDED, FENCED, FAILED, DEAD = "starting", "alive", "ended", "fenced", "failed", "dead"
"""States of the uploader. FENCED: another mount took over. FAILED: a bug, or the directory is gone."""
LOCK = "lock"
_POLL_S = 0.1


class Unsent(Struct, frozen=True):
    """Change that is not in the bucket. `why` is what it waits for, or why it is not uploaded."""

    name: str
    num_bytes: int
    why: str


class DirectoryStatus(Struct, frozen=True):
    """Status of a write-back directory at the time of the scan.

    `waiting` is in upload order. `unread` files have changes that the uploader has not recorded yet.
    `written` files are open for writing. `left_out` files are not uploaded as they are: incomplete, rejected
    or skipped. `trouble` is why uploading fails, or empty.
    """

    directory: str
    place: str
    uploader: str
    pid: int | None
    num_sent: int
    waiting: tuple[Unsent, ...]
    unread: tuple[Unsent, ...]
    written: tuple[Unsent, ...]
    left_out: tuple[Unsent, ...]
    trouble: str

    @property
    def is_settled(self) -> bool:
        """True if nothing is left that the uploader would send."""
        return not (self.waiting or self.unread or self.written)

    @property
    def is_drained(self) -> bool:
        """True if all files of the directory are in the bucket."""
        return self.is_settled and not self.left_out and self.uploader != STARTING

    @property
    def is_running(self) -> bool:
        """True if an uploader is running."""
        return self.uploader in (STARTING, ALIVE)

    @property
    def num_unsent(self) -> int:
        """Number of changes that are not in the bucket."""
        return len(self.waiting) + len(self.unread) + len(self.written) + len(self.left_out)

    def as_json(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        facts = {"is_drained": self.is_drained, "is_settled": self.is_settled, **to_plain(self)}
        return json.loads(json.dumps(facts))  # with lists

    def summary(self) -> str:
        """Return one line for users."""
        if self.is_drained:
            return f"all of {self.directory} is in {self.place} ({plural(self.num_sent, 'file')})"
        parts = [
            f"{len(found)} {what} ({format_bytes(sum(one.num_bytes for one in found))})"
            for found, what in (
                (self.waiting, "waiting"),
                (self.unread, "just changed"),
                (self.written, "open for writing"),
                (self.left_out, "left out"),
            )
            if found
        ]
        return f"not all of {self.directory} is in {self.place}: " + ", ".join(parts or [self.uploader])


def status_of(directory: str | os.PathLike[str]) -> DirectoryStatus:
    """Return the status of a write-back directory.

    Raises:
        NotFound: the directory was never mounted.
        RetryLater: the journal cannot be read now.
        Corrupt: the journal is damaged.

    Blocks: for a scan of all files. Does not wait for the uploader.
    """
    root = Path(directory).absolute()
    is_held = has_uploader(root)
    with closing(Journal(root)) as journal:
        state, order = journal.get("state"), journal.load()
        text = journal.get("exclude", json.dumps(EXCLUDED))
        exclude = read_as(tuple[str, ...], decode(text, "exclude"), "exclude")
        # The files are scanned after the journal is read, so that any change in between is seen.
        waiting, unread, written, left_out = _compare(root, order, exclude)
        pid, place = journal.get("pid"), journal.get("place")
        trouble, since = journal.get("trouble"), journal.get("trouble_unix_s")
    if trouble and since:
        trouble += f" ({format_duration(max(0.0, time.time() - float(since)))} ago)"
    uploader = state if is_held or state in (ENDED, FENCED, FAILED) else DEAD
    return DirectoryStatus(
        str(root),
        place,
        uploader,
        int(pid) if pid and is_held else None,
        len(order.sent),
        waiting,
        unread,
        written,
        left_out,
        trouble if waiting or uploader in (FENCED, FAILED) else "",
    )


def wait_until_settled(
    directory: str | os.PathLike[str], *, timeout_s: float | None = None
) -> DirectoryStatus:
    """Wait until every file that can be uploaded is in the bucket.

    Args:
        timeout_s: limit for waiting. None: as long as the uploader is running.

    Returns:
        The last status: settled, or with an uploader that is dead or has ended.

    Raises:
        RetryLater: the time ran out. The message lists what is left.
        NotFound: the directory was never mounted.

    Blocks: until then.
    """
    began_s = time.monotonic()
    while True:
        status = status_of(directory)
        if (status.is_settled and status.uploader != STARTING) or not status.is_running:
            return status
        waited_s = time.monotonic() - began_s
        if timeout_s is not None and waited_s >= timeout_s:
            trouble = f" {status.trouble}" if status.trouble else ""
            raise RetryLater(f"After {format_duration(waited_s)}, {status.summary()}.{trouble}")
        time.sleep(_POLL_S if timeout_s is None else min(_POLL_S, max(timeout_s - waited_s, 0.001)))


def has_uploader(root: Path) -> bool:
    """Return True if an uploader is running."""
    lock = root / FOLDER / LOCK
    try:
        with opened(lock, os.O_RDWR) as fd:
            return not try_flock(fd, is_shared=True)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RetryLater(f"Cannot open {lock}: {error.strerror}.", key=str(lock)) from error


def _compare(root: Path, order: UploadQueue, exclude: tuple[str, ...]) -> tuple[tuple[Unsent, ...], ...]:
    if not root.is_dir():
        raise NotFound(f"{root} is gone.")
    found, others = scan(root, lambda name: is_excluded(name, exclude))
    present = {one.name for one in found}
    waiting = tuple(
        Unsent(entry.name, entry.version.fingerprint.num_bytes, "")
        if entry.version
        else Unsent(entry.name, 0, "to be deleted")
        for entry in order.entries.values()
    )
    # A name may not be UTF-8.
    shown = {os.fsencode(name).decode("utf-8", "backslashreplace"): why for name, why in others.items()}
    unread, written, left_out = [], [], [Unsent(name, 0, why) for name, why in shown.items()]
    for file in found:
        if is_open_now(root / file.name):
            written.append(Unsent(file.name, file.fingerprint.num_bytes, "it is open for writing"))
        elif (why := _why_not_sent(order, file)) is not None:
            (left_out if why else unread).append(Unsent(file.name, file.fingerprint.num_bytes, why))
    gone = [name for name in order.sent if name not in present and not order.has_pending(name)]
    unread += [Unsent(name, 0, "it was deleted") for name in gone if name not in others]
    return waiting, tuple(unread), tuple(written), tuple(left_out)


def _why_not_sent(order: UploadQueue, file: ScannedFile) -> str | None:
    """Return why a file is not uploaded: "" if its change is not recorded, None if it is queued or sent."""
    problem, sent = order.problems.get(file.name), order.sent.get(file.name)
    if problem and problem.fingerprint == file.fingerprint:
        return f"{problem.kind}: {problem.why}"
    if sent and sent.fingerprint.matches(file.fingerprint) and file.is_settled:
        return None
    if order.has_pending(file.name) and order.fingerprint(file.name) == file.fingerprint:
        return None
    return ""
