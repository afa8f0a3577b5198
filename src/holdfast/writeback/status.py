"""What of a directory is not in its bucket: told from the journal and a look at every file, by any process.

No uploader is asked, so a dead one is told as dead, and one that is behind, or has lost events, hides
nothing: a file counts as being in the bucket only if it looks as it did when it was sent, and nobody has it
open for writing.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.documents import decode, read_as
from holdfast.errors import NotFound, RetryLater
from holdfast.quantity import plural, say_bytes, say_seconds
from holdfast.writeback.files import Found, is_open_now, look
from holdfast.writeback.journal import FOLDER, Journal
from holdfast.writeback.order import Entry, Order
from holdfast.writeback.terms import EXCLUDED, skips

STARTING, ALIVE, ENDED, FENCED, FAILED, DEAD = "starting", "alive", "ended", "fenced", "failed", "dead"
"""The uploader: prepares; works; ended as it should; another mount took over; a bug or a vanished directory;
was killed."""
LOCK = "lock"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Unsent:
    """A change that the bucket has not seen. `why` - what it waits for, or why it will not go."""

    name: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Status:
    """How a write-back directory stood at the moment when each of its files was looked at.

    `waiting` - in the order in which they go. `unread` - changed, and the uploader has not taken note yet.
    `written` - somebody has them open for writing. `left_out` - they do not go as they are: torn, no object
    can be so, or passed over. `trouble` - why the uploader does not get on; "" if it does.
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
        """Nothing is left that the uploader would still send."""
        return not (self.waiting or self.unread or self.written)

    @property
    def is_drained(self) -> bool:
        """All that was in the directory is in the bucket."""
        return self.is_settled and not self.left_out and self.uploader != STARTING

    @property
    def works(self) -> bool:
        """Whether an uploader is there to send what is not sent."""
        return self.uploader in (STARTING, ALIVE)

    @property
    def num_unsent(self) -> int:
        """How many changes are not in the bucket."""
        return len(self.waiting) + len(self.unread) + len(self.written) + len(self.left_out)

    def as_json(self) -> dict[str, Any]:
        """Members for programs."""
        facts = {"is_drained": self.is_drained, "is_settled": self.is_settled, **asdict(self)}
        return json.loads(json.dumps(facts))

    def say(self) -> str:
        """One line for people."""
        if self.is_drained:
            return f"all of {self.directory} is in {self.place} ({plural(self.num_sent, 'file')})"
        parts = [
            f"{len(found)} {what} ({say_bytes(sum(one.num_bytes for one in found))})"
            for found, what in (
                (self.waiting, "waiting"),
                (self.unread, "just changed"),
                (self.written, "open for writing"),
                (self.left_out, "left out"),
            )
            if found
        ]
        return f"not all of {self.directory} is in {self.place}: " + ", ".join(parts or [self.uploader])


def status_of(directory: str | os.PathLike[str]) -> Status:
    """How a write-back directory stands.

    Raises:
        NotFound: it never was one.
        RetryLater: its journal cannot be read now.
        Corrupt: its journal is damaged.

    Blocks: while it looks at every file; not on the uploader.
    """
    root = Path(directory).absolute()
    is_held = is_locked(root)
    journal = Journal(root, is_reader=True)
    try:
        state, order = journal.fact("state"), journal.load()
        exclude = read_as(
            tuple[str, ...], decode(journal.fact("exclude", json.dumps(EXCLUDED)), "exclude"), "exclude"
        )
        # Only now are the files looked at: what changes after the journal was read shows as changed.
        waiting, unread, written, left_out = _compare(root, order, exclude)
        pid, place, trouble = journal.fact("pid"), journal.fact("place"), _trouble(journal)
    finally:
        journal.close()
    uploader = state if is_held or state in (ENDED, FENCED, FAILED) else DEAD
    return Status(
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
    directory: str | os.PathLike[str],
    *,
    timeout_s: float | None = None,
    seen: Callable[[Status], None] | None = None,
) -> Status:
    """Wait until all that can be in the bucket is there.

    Args:
        directory: the write-back directory.
        timeout_s: the longest wait; None for as long as the uploader works.
        seen: told each status on the way.

    Returns:
        The last status: settled, or with an uploader that is dead or has ended.

    Raises:
        RetryLater: time ran out; the message says what is left.
        NotFound: the directory never was a write-back directory.

    Blocks: until then.
    """
    began_s = time.monotonic()
    while True:
        status = status_of(directory)
        if seen:
            seen(status)
        if (status.is_settled and status.uploader != STARTING) or not status.works:
            return status
        waited_s = time.monotonic() - began_s
        if timeout_s is not None and waited_s >= timeout_s:
            trouble = f" {status.trouble}" if status.trouble else ""
            raise RetryLater(f"After {say_seconds(waited_s)}, {status.say()}.{trouble}")
        time.sleep(_POLL_S if timeout_s is None else min(_POLL_S, max(timeout_s - waited_s, 0.001)))


def is_locked(root: Path) -> bool:
    """Return True if an uploader is alive.

    Raises:
        RetryLater: the lock could not be looked at.
    """
    lock = root / FOLDER / LOCK
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise RetryLater(f"{lock} could not be opened: {error.strerror}.", key=str(lock)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _compare(root: Path, order: Order, exclude: tuple[str, ...]) -> tuple[tuple[Unsent, ...], ...]:
    if not root.is_dir():
        raise NotFound(f"{root} is gone.")
    found, others = look(root, lambda name: skips(name, exclude))
    present = {one.name for one in found}
    waiting = tuple(_waiting(entry) for entry in order.entries.values())
    unread, written, left_out = [], [], [Unsent(_shown(name), 0, why) for name, why in others.items()]
    for one in found:
        if is_open_now(root / one.name):
            written.append(Unsent(one.name, one.fingerprint.num_bytes, "it is open for writing"))
        elif (why := _why_not_sent(order, one)) is not None:
            (left_out if why else unread).append(Unsent(one.name, one.fingerprint.num_bytes, why))
    gone = [name for name in order.sent if name not in present and not order.has_pending(name)]
    unread += [Unsent(name, 0, "it was deleted") for name in gone if name not in others]
    return waiting, tuple(unread), tuple(written), tuple(left_out)


def _why_not_sent(order: Order, one: Found) -> str | None:
    """None if the file is sent, or is among those that wait; "" if nobody has taken note of it."""
    problem, sent = order.problems.get(one.name), order.sent.get(one.name)
    if problem and problem.fingerprint == one.fingerprint:
        return f"{problem.kind}: {problem.why}"
    if sent and sent.fingerprint.matches(one.fingerprint) and one.is_settled:
        return None
    if order.has_pending(one.name) and order.known(one.name) == one.fingerprint:
        return None
    return ""


def _shown(name: str) -> str:
    """The name as text, whatever bytes it has."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _waiting(entry: Entry) -> Unsent:
    if entry.version is None:
        return Unsent(entry.name, 0, "to be deleted")
    return Unsent(entry.name, entry.version.fingerprint.num_bytes, "")


def _trouble(journal: Journal) -> str:
    text, since = journal.fact("trouble"), journal.fact("trouble_unix_s")
    return f"{text} ({say_seconds(max(0.0, time.time() - float(since)))} ago)" if text and since else text
