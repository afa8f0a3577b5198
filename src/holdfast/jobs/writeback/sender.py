"""Sender of queued entries: uploads as the queue allows, each as a whole, with retries."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath

import xxhash

from holdfast.checkpoint.format.layout import MAX_HEADER_BYTES, header_bytes, parse_header
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, HoldfastError, InvalidInput, NotFound, Unsupported
from holdfast.jobs.writeback.config import OPEN_LIMIT_S, UploaderConfig
from holdfast.jobs.writeback.files import FOR_INSPECTION, Fingerprint, is_being_written, is_settled
from holdfast.jobs.writeback.journal import JournaledQueue
from holdfast.jobs.writeback.reconciliation import check_newest_attempt
from holdfast.jobs.writeback.upload_queue import COPY, INCOMPLETE, PATH, REJECTED, SKIPPED, Sent, Upload
from holdfast.jobs.writeback.versions import KeptVersions
from holdfast.system import backoff
from holdfast.system.documents import Count, read_as
from holdfast.system.failpoint import failpoint
from holdfast.system.units import format_duration

_BLOCK_BYTES = 8 << 20
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 30.0
_MAX_SIDE_BY_SIDE = 8  # uploads of a series at the same time, if the store takes as many
_LOOK_S = 0.05  # between two checks whether a file is still open
_ATTEMPT_CHECK_S = 5.0  # between two checks whether a newer attempt has taken over
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_END_BYTES, _ZIP_TAIL_BYTES = 22, 22 + 0xFFFF
_NEVER_EMPTY = (".pt", ".pth", ".npz", ".zip", ".safetensors")


class _Changed(Exception):
    """The file was written while it was being read."""


class Sender:
    """Threads that upload the entries of a queue, from their creation on."""

    def __init__(
        self, store: Store, queue: JournaledQueue, versions: KeptVersions, config: UploaderConfig
    ) -> None:
        self._store, self._queue, self._versions = store, queue, versions
        self._config = config
        self._attempt_checked_s = time.monotonic()
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        """Failure that ended the threads, if any."""
        self._limit = min(_MAX_SIDE_BY_SIDE, store.properties.parallel_reads)
        self._threads: list[threading.Thread] = []
        for _ in range(self._limit):
            self._threads.append(threading.Thread(target=self._run, name="holdfast-sender", daemon=True))
            self._threads[-1].start()

    def stop(self, timeout_s: float) -> None:
        """Stop after the current requests, all within a time. Unsent entries stay queued."""
        self._stopping.set()
        with self._queue.changed:
            self._queue.changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if (entry := self._queue.start_next(1.0, self._limit)) is not None:
                    self._process(entry)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.error = self.error or error
            self._stopping.set()

    def _process(self, begun: Upload) -> None:
        """Process an entry until it is done, with pauses after failures."""
        failing_since_s, num_failures, entry = 0.0, 0, begun
        while not self._stopping.is_set():
            try:
                if (now_s := time.monotonic()) - self._attempt_checked_s >= _ATTEMPT_CHECK_S:
                    check_newest_attempt(self._store, self._config.owner, self._config.attempt)
                    self._attempt_checked_s = now_s
                self._do(entry)
            except _Changed:
                self._stopping.wait(_LOOK_S)
            except Conflict:
                raise
            except (InvalidInput, Unsupported) as error:
                if entry.version is None:
                    self._queue.do(lambda order, entry=entry: order.mark_removed(entry))
                else:
                    self._skip(entry, REJECTED, str(error))
            except (HoldfastError, OSError) as error:
                num_failures += 1
                failing_since_s = failing_since_s or time.monotonic()
                since = format_duration(time.monotonic() - failing_since_s)
                self._queue.set_problem(entry, f"Uploading {entry.name} has failed for {since}: {error}")
                pause_s = backoff.doubled(num_failures, _FIRST_PAUSE_S, _LAST_PAUSE_S)
                self._stopping.wait(backoff.jittered(pause_s))
            if (changed := self._queue.order.entries.get(entry.number)) is None:
                self._queue.set_problem(entry, "")
                return
            entry = changed

    def _skip(self, entry: Upload, kind: str, why: str) -> None:
        self._queue.do(lambda order: order.skip(entry, kind, why))
        self._versions.drop(entry.number)

    def _do(self, entry: Upload) -> None:
        if entry.version is None:
            self._store.delete(entry.name)
            failpoint("writeback.sent")
            self._queue.do(lambda order: order.mark_removed(entry))
            return
        try:
            path = self._versions.path(entry.number, entry.name, entry.version.form)
            fd = os.open(path, FOR_INSPECTION)
        except FileNotFoundError:
            if entry.version.form == PATH:
                self._skip(entry, SKIPPED, "it was deleted or renamed before it could be kept")
            else:
                self._queue.do(lambda order: order.mark_lost(entry))
            return
        try:
            self._put(entry, fd)
        finally:
            os.close(fd)

    def _put(self, entry: Upload, fd: int) -> None:
        """Upload a file under the entry's name, unless the bucket has the same bytes."""
        version = entry.version
        assert version is not None
        if version.form == COPY:
            fingerprint = version.fingerprint
        elif not self._wait_until_closed(entry, fd):
            return
        else:
            fingerprint = Fingerprint.of(os.fstat(fd))
        if reason := truncation_reason(fd, entry.name):
            self._skip(entry, INCOMPLETE, f"{reason}; its writer was probably killed")
            return
        sent = self._queue.order.sent.get(entry.name)
        if not _is_same(entry, fingerprint, sent):
            sent = self._copied(entry, fingerprint)
        if sent is None:
            digest = self._upload(entry, fd)
            failpoint("writeback.sent")
        else:
            digest = sent.digest
        done = Sent(fingerprint, digest)
        self._queue.do(lambda order: order.mark_sent(entry, done))
        failpoint("writeback.done")
        self._versions.drop(entry.number)

    def _wait_until_closed(self, entry: Upload, fd: int) -> bool:
        """Wait until a reopened file is closed. Return False if that took too long and it was skipped."""
        began_s = time.monotonic()
        while is_being_written(fd) or not is_settled(os.fstat(fd), time.time_ns()):
            waited_s = time.monotonic() - began_s
            if waited_s > OPEN_LIMIT_S:
                open_for = format_duration(waited_s)
                why = f"it was open for writing for {open_for}; it is uploaded once it is closed"
                self._skip(entry, SKIPPED, why)
                return False
            if waited_s > 1:
                what = "was opened for writing again; files closed later wait for it"
                self._queue.set_problem(entry, f"{entry.name} {what}")
            if self._stopping.wait(_LOOK_S):
                raise _Changed
        return True

    def _copied(self, entry: Upload, fingerprint: Fingerprint) -> Sent | None:
        """Let the bucket copy the bytes from the file's earlier name, if possible."""
        source = self._queue.order.sent.get(entry.source)
        if not _is_same(entry, fingerprint, source):
            return None
        with suppress(Unsupported, NotFound):
            self._store.link(entry.source, entry.name)
            failpoint("writeback.sent")
            return source
        return None

    def _upload(self, entry: Upload, fd: int) -> str:
        hashed, before = xxhash.xxh3_128(), os.fstat(fd)
        size = before.st_size

        def check() -> None:
            """Check that the file has not changed, before the last part is sent."""
            if entry.version is None or entry.version.form == COPY:
                return
            if Fingerprint.of(os.fstat(fd)) != Fingerprint.of(before) or is_being_written(fd):
                raise _Changed

        def blocks() -> Iterator[memoryview]:
            room, at = memoryview(bytearray(min(_BLOCK_BYTES, max(size, 1)))), 0
            while at < size:
                got = os.preadv(fd, [room[: size - at]], at)
                if not got:
                    raise _Changed
                at += got
                hashed.update(room[:got])
                if at == size:
                    check()
                yield room[:got]
            if not size:
                check()

        self._store.put_parts(entry.name, blocks(), size)
        return hashed.hexdigest()


def _is_same(entry: Upload, fingerprint: Fingerprint, sent: Sent | None) -> bool:
    if sent is None or entry.version is None:
        return False
    digest = entry.version.digest
    return sent.fingerprint.matches(fingerprint) or (bool(digest) and digest == sent.digest)


def truncation_reason(fd: int, name: str) -> str:
    """Return why a zip archive or safetensors file is incomplete, as its bytes show; otherwise ""."""
    num_bytes, suffix = os.fstat(fd).st_size, PurePosixPath(name).suffix
    if not num_bytes:
        return "it is empty" if suffix in _NEVER_EMPTY else ""
    if suffix == ".safetensors":
        return _safetensors_truncation(fd, num_bytes)
    if os.pread(fd, 4, 0) == _ZIP:
        return _zip_truncation(fd, num_bytes)
    return ""


def _zip_truncation(fd: int, num_bytes: int) -> str:
    start = max(0, num_bytes - _ZIP_TAIL_BYTES)
    tail = os.pread(fd, num_bytes - start, start)
    at = tail.rfind(_ZIP_END)
    while at >= 0:
        if at + _ZIP_END_BYTES <= len(tail):
            (comment_bytes,) = struct.unpack_from("<H", tail, at + 20)
            if at + _ZIP_END_BYTES + comment_bytes == len(tail):
                return ""
        at = tail.rfind(_ZIP_END, 0, at)
    return "it starts as a zip archive (as written by torch.save), but the directory at its end is missing"


def _safetensors_truncation(fd: int, num_bytes: int) -> str:
    head = os.pread(fd, 8, 0)
    if len(head) < 8:
        return "it is too short for a safetensors file"
    if header_bytes(head) - 8 > MAX_HEADER_BYTES:
        return ""  # not a safetensors file despite its name
    try:
        entries, start = parse_header(os.pread(fd, min(header_bytes(head), num_bytes), 0), "the file")
        ends = [entry["data_offsets"][-1] for name, entry in entries.items() if name != "__metadata__"]
        wanted = start + max(read_as(list[Count], ends, "the header"), default=0)
    except (Corrupt, LookupError, TypeError):
        return "the header of a safetensors file is missing or truncated"
    if num_bytes < wanted:
        return f"its header specifies {wanted} bytes, but only {num_bytes} exist"
    return ""
