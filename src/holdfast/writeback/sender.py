"""Sends entries to the bucket, one after the other, each whole; tries again as long as it takes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from holdfast.errors import Conflict, HoldfastError, InvalidInput, NotFound, Unsupported
from holdfast.killpoint import kill_point
from holdfast.quantity import say_seconds
from holdfast.store import Store
from holdfast.writeback.book import Book
from holdfast.writeback.capture import Captures
from holdfast.writeback.claim import check_not_overtaken
from holdfast.writeback.files import Fingerprint, is_being_written, is_settled, open_file
from holdfast.writeback.order import COPY, PASSED_OVER, PATH, REFUSED, WITHHELD, Entry, Sent
from holdfast.writeback.terms import Terms
from holdfast.writeback.whole import why_torn

_BLOCK_BYTES = 8 << 20
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 30.0
_LOOK_S = 0.05  # between two looks whether a file is still open
_CLAIM_S = 5.0  # between two looks whether a newer attempt has taken over
_dice = random.Random()


class _Changed(Exception):
    """The file was written while it was read."""


@dataclass(slots=True)
class _Outage:
    """How long sending has failed."""

    since_s: float | None = None
    num_tries: int = 0


class Sender:
    """A thread that does what the order says.

    Args:
        store: the bucket.
        book: the order.
        captures: where kept versions are.
        terms: of the uploader; sending ends when a newer attempt of its owner has mounted the place.
    """

    def __init__(self, store: Store, book: Book, captures: Captures, terms: Terms) -> None:
        self._store, self._book, self._captures = store, book, captures
        self._terms = terms
        self._claim_seen_s = time.monotonic()
        self._outage = _Outage()
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        """Why it has ended, if it was not told to."""
        self._thread = threading.Thread(target=self._run, name="holdfast-sender", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the request at work; what is not sent stays in the order."""
        self._stopping.set()
        with self._book.changed:
            self._book.changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if (entry := self._book.begin_first(1.0)) is not None:
                    self._try(entry)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.error = error

    def _try(self, entry: Entry) -> None:
        """Do an entry, or wait a while if that fails.

        Raises:
            Conflict: another mount has taken over.
        """
        try:
            self._check_claim()
            self._do(entry)
        except _Changed:
            self._stopping.wait(_LOOK_S)
        except Conflict:
            raise
        except (InvalidInput, Unsupported) as error:
            self._refuse(entry, str(error))
        except (HoldfastError, OSError) as error:
            self._pause(entry, error)
        else:
            self._outage = _Outage()
            self._book.tell("")

    def _pause(self, entry: Entry, error: Exception) -> None:
        now_s = time.monotonic()
        if self._outage.since_s is None:
            self._outage.since_s = now_s
        self._outage.num_tries += 1
        since_s = now_s - self._outage.since_s
        self._book.tell(f"{entry.name} could not be sent, for {say_seconds(since_s)} now: {error}")
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._outage.num_tries - 1, 20), _LAST_PAUSE_S)
        self._stopping.wait(_dice.uniform(0.5, 1.0) * pause_s)

    def _check_claim(self) -> None:
        now_s = time.monotonic()
        if now_s - self._claim_seen_s < _CLAIM_S:
            return
        check_not_overtaken(self._store, self._terms.owner, self._terms.attempt)
        self._claim_seen_s = now_s

    def _refuse(self, entry: Entry, why: str) -> None:
        if entry.version is None:
            self._book.do(lambda order: order.removed_now(entry))
        else:
            self._pass(entry, REFUSED, why)

    def _pass(self, entry: Entry, kind: str, why: str) -> None:
        self._book.do(lambda order: order.passed(entry, kind, why))
        self._captures.drop(entry.number)

    # -- one entry -------------------------------------------------------------------------------------------

    def _do(self, entry: Entry) -> None:
        if entry.version is None:
            self._store.delete(entry.name)
            kill_point("writeback.sent")
            self._book.do(lambda order: order.removed_now(entry))
            return
        try:
            fd = open_file(self._captures.path(entry.number, entry.name, entry.version.form))
        except FileNotFoundError:
            if entry.version.form == PATH:
                self._pass(entry, PASSED_OVER, "it was deleted or renamed before it could be kept")
            else:
                self._book.do(lambda order: order.demote(entry))
            return
        try:
            self._put(entry, fd)
        finally:
            os.close(fd)

    def _put(self, entry: Entry, fd: int) -> None:
        """Put the file's bytes under the entry's name, unless they are there.

        Raises:
            _Changed: it was written meanwhile; the bucket is as it was.
            RetryLater: the bucket failed.
        """
        version = entry.version
        assert version is not None
        if version.form == COPY:
            fingerprint = version.fingerprint
        elif not self._wait_until_closed(entry, fd):
            return
        else:
            fingerprint = Fingerprint.of(os.fstat(fd))
        if torn := why_torn(fd, entry.name):
            self._pass(entry, WITHHELD, f"{torn}; its writer was probably killed")
            return
        sent = self._sent_already(entry, fingerprint) or self._copied(entry, fingerprint)
        if sent is None:
            sent = Sent(fingerprint, self._upload(entry, fd))
            kill_point("writeback.sent")
        done = Sent(fingerprint, sent.digest)
        self._book.do(lambda order: order.sent_now(entry, done))
        kill_point("writeback.done")
        self._captures.drop(entry.number)

    def _wait_until_closed(self, entry: Entry, fd: int) -> bool:
        """Wait for a file that was opened again; False if that took too long and it was passed over."""
        began_s = time.monotonic()
        while is_being_written(fd) or not is_settled(os.fstat(fd), time.time_ns()):
            waited_s = time.monotonic() - began_s
            if waited_s > self._terms.open_limit_s:
                why = f"it was open for writing for {say_seconds(waited_s)}; it goes when it is closed"
                self._pass(entry, PASSED_OVER, why)
                return False
            if waited_s > 1:
                self._book.tell(
                    f"{entry.name} was opened for writing again; what was closed later waits for it"
                )
            if self._stopping.wait(_LOOK_S):
                raise _Changed
        return True

    def _sent_already(self, entry: Entry, fingerprint: Fingerprint) -> Sent | None:
        """What the bucket has under this name, if it is the same bytes."""
        sent = self._book.order.sent.get(entry.name)
        return sent if _is_same(entry, fingerprint, sent) else None

    def _copied(self, entry: Entry, fingerprint: Fingerprint) -> Sent | None:
        """Have the bucket copy the bytes from the file's earlier name, if it can and they are the same."""
        source = self._book.order.sent.get(entry.source)
        if not _is_same(entry, fingerprint, source):
            return None
        with suppress(Unsupported, NotFound):
            self._store.link(entry.source, entry.name)
            kill_point("writeback.sent")
            return source
        return None

    def _upload(self, entry: Entry, fd: int) -> str:
        """Send the bytes; returns their digest."""
        hashed, before = xxhash.xxh3_128(), os.fstat(fd)

        def check() -> None:
            """The last part leaves only after this, so nothing torn becomes visible."""
            if entry.version is None or entry.version.form == COPY:
                return
            after = os.fstat(fd)
            if Fingerprint.of(after) != Fingerprint.of(before) or is_being_written(fd):
                raise _Changed

        blocks = _blocks(fd, before.st_size, hashed.update, check)
        self._store.put_parts(entry.name, blocks, before.st_size)
        return hashed.hexdigest()


def _is_same(entry: Entry, fingerprint: Fingerprint, sent: Sent | None) -> bool:
    """Whether what was sent is what the entry has."""
    if sent is None or entry.version is None:
        return False
    digest = entry.version.digest
    return sent.fingerprint.matches(fingerprint) or (bool(digest) and digest == sent.digest)


def _blocks(
    fd: int, num_bytes: int, seen: Callable[[memoryview], None], check: Callable[[], None]
) -> Iterator[memoryview]:
    """The bytes of a file in the same memory, block by block; `check` is called after the last was read."""
    room = memoryview(bytearray(min(_BLOCK_BYTES, max(num_bytes, 1))))
    at = 0
    while at < num_bytes:
        got = os.preadv(fd, [room[: min(len(room), num_bytes - at)]], at)
        if not got:
            raise _Changed
        at += got
        seen(room[:got])
        if at == num_bytes:
            check()
        yield room[:got]
    if not num_bytes:
        check()
