"""Store in a bucket of S3 and compatible servers, Google Cloud Storage or Azure; with logs that grow."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from msgspec import Struct, field
from typing_extensions import override

from holdfast.checkpoint.format.names import CheckpointId, check_size
from holdfast.checkpoint.store import contract
from holdfast.checkpoint.store.address import AZURE, S3, Address, parse_address
from holdfast.checkpoint.store.client_errors import classify
from holdfast.checkpoint.store.clients import (
    Clients,
    StoreRequest,
    TryAgain,
    check_process,
    load_library,
    not_found,
)
from holdfast.checkpoint.store.compressed import CompressedFiles, stored_name
from holdfast.checkpoint.store.contract import Buffer, ObjectInfo, Properties, Store
from holdfast.checkpoint.store.error_codes import ErrorKind
from holdfast.errors import Conflict, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.system.failpoint import failpoint

READ_BYTES = 8 << 20
"""Length of the ranges, fetched concurrently, that longer reads are split into."""
CREATE_BYTES = 64 << 20
"""Largest object that is created by one request, which the server grants to only one writer."""
_MAX_PARTS = 10_000  # of one upload: the limit of S3 and of Google
_MAX_COPY_BYTES = {S3: 5 << 30}  # limit of one copy request; Azure copies asynchronously, so it is not used
_MAX_CHANGES = 3  # how often an object may be replaced while it is read


class ObjectStore(Store):
    """A prefix of a bucket; its URL is the one it was opened with, so other processes can open it too.

    Every request that fails for a transient reason is retried, with growing random pauses, until the
    address's time limit; in a large upload each part by itself. A name that must be free (`if_absent`) is
    claimed by one request that the server grants only once. If its answer is lost, the object is read back:
    the same bytes mean that it is ours. So writers that compete for a name must write different bytes, such
    as documents with a random id.

    If a put raises `RetryLater` because an answer never arrived, the object may exist under its name
    nevertheless; it is then complete.

    Above 64 MiB `if_absent` first checks the name and then uploads in parts, so for a moment another writer
    of the same name would go unnoticed. Use names for large objects that no other writer uses.

    Data files may be stored compressed (`put_compressed`). All other methods give and take the plain ones.

    Parts of uploads that a kill interrupted stay in the bucket, invisible but billed, until a lifecycle rule
    of the bucket removes them, because the client library cannot list them. Uploads that fail while the
    process is alive are aborted.

    Args:
        address: URL or parsed address.
    """

    def __init__(self, address: Address | str) -> None:
        self.address = parse_address(address) if isinstance(address, str) else address
        self.url = self.address.url
        self.properties = Properties(
            survives_host=True,
            parallel_reads=self.address.parallel,
            read_bytes=READ_BYTES,
            zero_copy_views=True,
        )
        self._library = load_library()
        self._clients = Clients(self.address)
        self._logs = shared_logs(self.url, self._load_log, self._save_log)
        self._compressed = CompressedFiles(lambda folder: list(self.list(folder)), self.read_into)

    @override
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write an object, sent from `data` itself without a copy."""
        contract.check_name(name)
        view = contract.as_bytes(data)
        self._logs.forget(name)
        failpoint("store.written")
        if if_absent and len(view) <= CREATE_BYTES:
            self._create(name, view)
        else:
            if if_absent:
                self._check_free(name)
            self._send(StoreRequest("write", name, len(view)), view)
        failpoint("store.linked")

    @override
    def put_parts(
        self, name: str, parts: Iterable[Buffer], num_bytes: int, *, if_absent: bool = False
    ) -> None:
        """Write an object from parts. Holds the parts of the upload in flight, and one more."""
        self._put_parts(name, exactly(name, parts, num_bytes), num_bytes, if_absent=if_absent)

    def put_compressed(
        self, name: str, base: CheckpointId | None, parts: Iterable[Buffer], size: int, *, if_absent: bool
    ) -> None:
        """Put the compressed form of a data file, see `format/compression.py`, as `put_parts`.

        Args:
            name: as in `put`.
            base: checkpoint whose file of this rank its differences are to, under the name of a base.
            parts: the compressed bytes in order.
            size: bytes of the plain file.
            if_absent: as in `put`; a plain file of this name counts too.
        """
        if if_absent:
            self._check_free(name)
        self._put_parts(stored_name(name, size, base), parts, size, if_absent=if_absent)

    def _put_parts(self, name: str, parts: Iterable[Buffer], most_bytes: int, *, if_absent: bool) -> None:
        """Write an object from parts, which have about `most_bytes`, or fewer."""
        contract.check_name(name)
        if most_bytes <= (CREATE_BYTES if if_absent else self.address.part_bytes):
            whole = bytearray()
            for part in parts:  # which may all be in the same memory
                whole += part
            self.put(name, whole, if_absent=if_absent)
            return
        if if_absent:
            self._check_free(name)
        self._logs.forget(name)
        segments = cut_segments(parts, self._part_bytes(most_bytes))
        errors: list[Exception] = []
        request = StoreRequest("write", name, most_bytes, num_tries=1)
        failpoint("store.written")
        try:
            # Not retried as a whole: the parts are gone. The client retries each request.
            self._upload(self._clients.get(retrying=True), name, _noting_errors(segments, errors), most_bytes)
        except Exception as error:
            if errors:
                raise errors[0] from None
            if not isinstance(error, self._clients.client_errors) or isinstance(error, HoldfastError):
                raise
            raise self._clients.failure(request, classify(error)) from None
        failpoint("store.linked")

    @override
    def link(self, source: str, name: str) -> None:
        """Copy an object on the server, so that no bytes are sent."""
        contract.check_name(source)
        contract.check_name(name)
        if found := self._compressed.find(source, is_missing=True):
            source, name = found.stored, name + found.stored.removeprefix(source)
        num_bytes = self.size(source)
        if num_bytes is None:
            raise not_found(self.address, source)
        most = _MAX_COPY_BYTES.get(self.address.protocol, num_bytes)
        if self.address.protocol == AZURE or num_bytes > most:
            raise Unsupported(
                f"The server cannot copy {self._place(source)} ({num_bytes} bytes) in one request. Put the "
                "bytes instead.",
                key=source,
            )
        keys = self.address.key(source), self.address.key(name)
        self._logs.forget(name)
        self._clients.call(StoreRequest("copy", source), lambda client: self._library.copy(client, *keys))
        if self.size(name) != num_bytes:
            raise RetryLater(
                f"The copy {self._place(name)} is not as long as {self._place(source)}.", key=name
            )

    @override
    def get(self, name: str) -> bytes:
        contract.check_name(name)
        self._logs.flush(name)
        return self._get(name)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. A long read is split into ranges that are fetched concurrently.

        The bytes are used as received: a byte that was flipped on the way is detected by comparing hashes,
        not here.
        """
        contract.check_name(name)
        self._logs.flush(name)
        if not len(buffer) and self.size(name) is None:
            raise not_found(self.address, name)
        if (found := self._compressed.find(name)) is None:
            try:
                self._read_plain(name, offset, buffer)
            except NotFound:
                found = self._compressed.find(name, is_missing=True)
                if found is None:
                    raise
        if found is not None:
            self._compressed.read_into(name, found, offset, buffer)

    def _read_plain(self, name: str, offset: int, buffer: memoryview) -> None:
        for _ in range(_MAX_CHANGES):
            versions = self._read_ranges(name, offset, buffer)
            if len(versions) < 2:
                return
        raise RetryLater(f"{self._place(name)} was replaced repeatedly while it was read.", key=name)

    @override
    def read_view(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """Return the client's own memory, filled by one request."""
        contract.check_name(name)
        self._logs.flush(name)
        if not num_bytes and self.size(name) is None:
            raise not_found(self.address, name)
        if self._compressed.find(name) is None:
            try:
                return self._fetch(name, offset, num_bytes)[0] if num_bytes else memoryview(b"")
            except NotFound:
                if self._compressed.find(name, is_missing=True) is None:
                    raise
        return super().read_view(name, offset, num_bytes)

    @override
    def append(self, name: str, data: bytes) -> None:
        """Append in memory. The data is sent in the background, by `flush`, and at exit.

        Reads through a store of this process see it at once; a killed process loses the last seconds.
        """
        contract.check_name(name)
        check_process(self.address.place)
        self._logs.append(name, data)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List objects."""
        self._logs.flush(contract.check_prefix(prefix))
        folder = self.address.key(prefix).rpartition("/")[0] if prefix else self.address.prefix
        found = self._clients.call(StoreRequest("list", prefix), lambda client: self._listed(client, folder))
        return self._compressed.plain(entry for entry in found if entry.name.startswith(prefix))

    def unused_bases(self, attempt: int) -> list[str]:
        """Return the bases that no compressed file refers to, nor will one of `attempt`, the newest."""
        return self._compressed.unused_bases(self.list(), attempt)

    @override
    def size(self, name: str) -> int | None:
        contract.check_name(name)
        self._logs.flush(name)
        with suppress(NotFound):
            return self._clients.call(StoreRequest("find", name), lambda client: self._size(client, name))
        found = self._compressed.find(name, is_missing=True)
        return None if found is None else found.plain_bytes

    @override
    def delete(self, name: str) -> None:
        """Remove an object."""
        contract.check_name(name)
        self._logs.forget(name)
        if found := self._compressed.files.pop(name, None):  # whoever deletes files has listed them
            self.delete(found.stored)
        key = self.address.key(name)
        with suppress(NotFound):
            self._clients.call(StoreRequest("delete", name), lambda client: self._library.delete(client, key))

    @override
    def sweep(self, prefix: str = "") -> None:
        contract.check_prefix(prefix)  # the library cannot list unfinished uploads; see the class docstring

    @override
    def check(self) -> None:
        """Create a small object, try to create it again, and delete it."""
        name = f"checks/{secrets.token_hex(8)}.txt"
        first, second = secrets.token_bytes(16).hex().encode(), secrets.token_bytes(16).hex().encode()
        list(self.list("checks/"))  # detects a missing bucket, which a put reports like other failures
        self.put(name, first, if_absent=True)
        try:
            self.put(name, second, if_absent=True)
        except Conflict:
            return
        finally:
            self.delete(name)
        raise Unsupported(
            f"The server of {self.address.place} replaces existing objects although the request forbids it "
            "(it ignores 'If-None-Match: *'), so two starts of a run could damage each other's "
            "checkpoints. Only a test object was written, and it was deleted. Use another server, a newer "
            "version of it, or a connection without a proxy that changes requests."
        )

    @override
    def flush(self) -> None:
        """Write all appended logs.

        Blocks: until the logs are written, at most the address's time limit each.
        """
        self._logs.flush()

    @override
    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._clients.drop()

    # -- writing ---------------------------------------------------------------------------------------------
    def _send(self, request: StoreRequest, data: Buffer) -> None:
        """Write an object, replacing any existing one."""

        def send(client: Any) -> None:
            self._upload(client, request.name, data, len(data))

        self._clients.call(request, send, retrying=len(data) > self.address.part_bytes)

    def _upload(self, client: Any, name: str, body: Any, num_bytes: int) -> None:
        part_bytes = self._part_bytes(num_bytes)
        self._library.put(
            client,
            self.address.key(name),
            body,
            use_multipart=num_bytes > self.address.part_bytes,
            chunk_size=part_bytes,
            max_concurrency=self.address.parallel,
        )

    def _part_bytes(self, num_bytes: int) -> int:
        """Return the size of a part: the address's, or larger if an object would have too many parts."""
        least = -(-num_bytes // _MAX_PARTS)
        return max(self.address.part_bytes, -(-least // (1 << 20)) << 20)

    def _create(self, name: str, view: memoryview) -> None:
        """Claim a free name by one request. Find out whose it is if the answer does not show it."""

        def create(client: Any) -> bool:
            try:
                self._library.put(client, self.address.key(name), view, mode="create", use_multipart=False)
            except self._clients.client_errors as error:
                # A name in use may be our own: the answer to an earlier try may have been lost.
                failure = classify(error)
                if failure.kind not in (ErrorKind.TAKEN, ErrorKind.PASSING):
                    raise
                with suppress(*self._clients.client_errors):  # it is absent or unreadable now
                    found = self._library.get(client, self.address.key(name))
                    return found.meta["size"] == len(view) and memoryview(found.bytes()) == view
                if failure.kind is ErrorKind.TAKEN:  # another writer was writing it, or has deleted it
                    raise TryAgain(failure.reason) from error
                raise
            return True

        if not self._clients.call(StoreRequest("write", name, len(view)), create):
            raise contract.already_exists(self._place(name), name)

    def _size(self, client: Any, name: str) -> int:
        key = self.address.key(name)
        try:
            return self._library.head(client, key)["size"]
        except self._clients.client_errors as error:
            if classify(error).kind not in (ErrorKind.DENIED, ErrorKind.LASTING):
                raise
            # An answer to HEAD has no body, and so no code: a refused one is repeated as GET, for its reason.
            return self._library.get(client, key).meta["size"]

    def _check_free(self, name: str) -> None:
        if self.size(name) is not None:
            raise contract.already_exists(self._place(name), name)

    # -- reading ---------------------------------------------------------------------------------------------
    def _get(self, name: str, limit_s: float | None = None) -> bytes:
        def read_whole(client: Any) -> bytes:
            answer = self._library.get(client, self.address.key(name))
            check_size(name, answer.meta["size"])
            return bytes(answer.bytes())

        return self._clients.call(StoreRequest("read", name, limit_s=limit_s), read_whole)

    def _read_ranges(self, name: str, offset: int, buffer: memoryview) -> set[str | None]:
        """Fill the buffer, and return the versions of the object that its ranges came from."""

        def fill(start: int) -> str | None:
            part = buffer[start : start + READ_BYTES]
            part[:], version = self._fetch(name, offset + start, len(part))
            return version

        starts = range(0, len(buffer), READ_BYTES)
        if len(starts) < 2:
            return set(map(fill, starts))
        versions = set()
        with ThreadPoolExecutor(min(self.address.parallel, len(starts)), "holdfast-range") as pool:
            ranges = [pool.submit(fill, start) for start in starts]
            try:
                for piece in ranges:
                    versions.add(piece.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return versions

    def _fetch(self, name: str, offset: int, num_bytes: int) -> tuple[memoryview, str | None]:
        """Return a range of an object by one request, and the object's version."""
        key = self.address.key(name)

        def fetch(client: Any) -> tuple[memoryview, str | None]:
            found = self._library.get(client, key, options={"range": (offset, offset + num_bytes)})
            return memoryview(found.bytes()), found.meta["e_tag"]

        none: tuple[memoryview, str | None] = memoryview(b""), None
        data, version = self._clients.call(StoreRequest("read", name, num_bytes), fetch, past_end=none)
        if len(data) < num_bytes:
            raise contract.ends_early(self._place(name), name, self.size(name), offset, num_bytes)
        return data, version

    def _listed(self, client: Any, folder: str) -> list[ObjectInfo]:
        skip = len(self.address.prefix) + 1 if self.address.prefix else 0
        found = []
        for page in self._library.list(client, prefix=folder or None, chunk_size=1000):
            for entry in page:
                name = entry["path"][skip:]
                if name and not name.endswith("/"):  # consoles create such objects as folders
                    found.append(ObjectInfo(name, entry["size"]))
        return found

    def _load_log(self, name: str, limit_s: float | None) -> bytes | None:
        with suppress(NotFound):
            return self._get(name, limit_s)
        return None

    def _save_log(self, name: str, text: bytes, limit_s: float | None) -> None:
        self._send(StoreRequest("write", name, len(text), limit_s), text)

    def _place(self, name: str) -> str:
        return f"{self.address.place}/{name}"


def exactly(name: str, parts: Iterable[Buffer], num_bytes: int) -> Iterator[Buffer]:
    """Yield parts, and raise if their total size is not the announced one."""
    done = 0
    for part in parts:
        done += memoryview(part).nbytes
        if done > num_bytes:
            break
        yield part
    if done != num_bytes:
        raise contract.length_error(name, num_bytes, done)


def cut_segments(parts: Iterable[Buffer], segment_bytes: int) -> Iterator[bytearray]:
    """Yield the bytes of parts in segments of equal length, the last one perhaps shorter.

    Each segment has memory of its own, because several are sent while the next is filled.
    """
    segment = bytearray()
    for part in parts:
        rest = contract.as_bytes(part)
        while rest:
            room = segment_bytes - len(segment)
            segment += rest[:room]
            rest = rest[room:]
            if len(segment) == segment_bytes:
                yield segment
                segment = bytearray()
    if segment:
        yield segment


def _noting_errors(segments: Iterator[bytearray], errors: list[Exception]) -> Iterator[bytearray]:
    """Yield segments; add an exception of their producer to `errors`, in case the consumer wraps it."""
    try:
        yield from segments
    except Exception as error:
        errors.append(error)
        raise


LOG_PAUSE_S = 2.0
"""Pause before appended lines are sent, longer for long logs, because each write sends the whole log."""
LOG_BYTES_PER_PAUSE = 256 << 10
"""Log size that adds one more `LOG_PAUSE_S` to the pause, which bounds the bytes sent per second."""
MAX_LOG_BYTES = 64 << 20
"""Maximum size of a log."""
LOG_LIMIT_S = 10.0
"""Time limit of one write in the background or at exit."""

LoadLog = Callable[[str, "float | None"], "bytes | None"]
SaveLog = Callable[[str, bytes, "float | None"], None]


class _Log(Struct):
    tail: bytearray = field(default_factory=bytearray)  # bytes that this process has appended
    base: bytes | None = None  # earlier content of the log, once it is loaded
    saved: int = 0  # bytes of the tail that are in the store
    due_s: float = 0.0  # time of the next write, by the monotonic clock

    @property
    def is_dirty(self) -> bool:
        return self.saved < len(self.tail)


class AppendLogs:
    """The logs of one store that this process appends to.

    A thread writes appended data after a pause. `flush` writes it at once, and so does a normal exit.

    `load` returns an object's bytes, or None if it does not exist; it retries for so many seconds (None: the
    store's own limit). `save` writes an object, likewise.
    """

    def __init__(self, load: LoadLog, save: SaveLog) -> None:
        self._load = load
        self._save = save
        self._logs: dict[str, _Log] = {}
        self._lock = threading.RLock()  # taken directly: Ctrl+C in Condition.__enter__ leaves it locked
        self._changed = threading.Condition(self._lock)
        self._writing = threading.Lock()  # one write at a time: an older text must never replace a newer one
        self._thread: threading.Thread | None = None
        self._trouble: HoldfastError | None = None
        self._pid = os.getpid()

    def append(self, name: str, data: bytes) -> None:
        """Append `data` to a log, to be written soon."""
        with self._lock:
            log = self._logs.setdefault(name, _Log())
            if len(log.base or b"") + len(log.tail) + len(data) > MAX_LOG_BYTES:
                raise RetryLater(
                    f"The log {name} would exceed {MAX_LOG_BYTES} bytes; nothing was appended.", key=name
                )
            if not log.is_dirty:
                length = len(log.base or b"") + len(log.tail)
                log.due_s = time.monotonic() + LOG_PAUSE_S * (1 + length / LOG_BYTES_PER_PAUSE)
            log.tail += data
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
                self._thread.start()
                atexit.register(self._at_exit)
            self._changed.notify_all()
            trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise RetryLater(
                f"The log {name} could not be written yet, and is kept in memory: {trouble}", key=name
            )

    def flush(self, prefix: str = "", *, limit_s: float | None = None) -> None:
        """Write the changed logs whose names begin with `prefix`.

        Blocks: until they are written.
        """
        for name in self._dirty(prefix):
            self._write(name, limit_s)

    def forget(self, name: str) -> None:
        """Discard a log that was deleted or replaced."""
        if name in self._logs:
            with self._writing, self._lock:
                self._logs.pop(name, None)

    def _dirty(self, prefix: str = "", before_s: float | None = None) -> list[str]:
        with self._lock:
            return [
                name
                for name, log in self._logs.items()
                if log.is_dirty and name.startswith(prefix) and (before_s is None or log.due_s <= before_s)
            ]

    def _write(self, name: str, limit_s: float | None) -> None:
        with self._writing:
            log = self._logs.get(name)
            if log is None or not log.is_dirty:
                return
            if log.base is None:
                log.base = self._load(name, limit_s) or b""
            with self._lock:
                text, length = log.base + bytes(log.tail), len(log.tail)
            self._save(name, text, limit_s)
            with self._lock:
                log.saved = length

    def _run(self) -> None:
        while True:
            with self._lock:
                due = [log.due_s for log in self._logs.values() if log.is_dirty]
                self._changed.wait(max(0.0, min(due) - time.monotonic()) if due else None)
            for name in self._dirty(before_s=time.monotonic()):
                try:
                    self._write(name, LOG_LIMIT_S)
                except HoldfastError as error:
                    with self._lock:
                        self._trouble = error
                        if name in self._logs:
                            self._logs[name].due_s = time.monotonic() + LOG_PAUSE_S

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has neither the thread nor the duty to write
        try:
            self.flush(limit_s=LOG_LIMIT_S)
        except HoldfastError as error:
            self._trouble = error  # too late to report it


_at: dict[str, AppendLogs] = {}
_at_lock = threading.Lock()


def shared_logs(url: str, load: LoadLog, save: SaveLog) -> AppendLogs:
    """Return the logs of a URL, shared by all its stores in this process."""
    with _at_lock:
        return _at.setdefault(url, AppendLogs(load, save))
