"""A store in a bucket of S3, of what speaks its protocol, of Google Cloud Storage or of Azure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.errors import Conflict, Corrupt, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.failpoint import failpoint
from holdfast.format.names import check_size
from holdfast.store.address import AZURE, S3, Address, parse_address
from holdfast.store.clients import Clients, check_process, load_library
from holdfast.store.contract import Buffer, Entry, Properties, Store
from holdfast.store.logs import logs_at
from holdfast.store.naming import check_name, check_prefix
from holdfast.store.refusals import Kind, classify
from holdfast.store.retries import Request, Retries, TryAgain, not_found
from holdfast.store.segments import Segments

READ_BYTES = 8 << 20
"""Longer reads are split into ranges of this many bytes, fetched at once."""
CREATE_BYTES = 64 << 20
"""Objects up to this length are created by one request, which the server grants to one of many."""
_MAX_PARTS = 10_000  # of one upload: S3's limit, and Google's
_MAX_COPY_BYTES = {S3: 5 << 30}  # that one request of a protocol copies; Azure copies later, and is not asked
_MAX_CHANGES = 3  # an object may be replaced this often while it is read


class ObjectStore(Store):
    """A prefix of a bucket; its URL is what it was opened with, so other processes get there too.

    Every request that fails for a reason that may pass is tried again, with growing random pauses, until the
    address's time limit; a part of a large upload for itself. A name that is to be free (`if_absent`) is
    taken by one request that the server grants once. If its answer is lost, the object is read back: the same
    bytes mean that it was ours, so what competes for a name must differ in its bytes, as documents with a
    random id do.

    When a put raises `RetryLater` because an answer never came, the object may stand under its name
    nevertheless; it is then whole.

    Above 64 MiB `if_absent` looks first and then uploads in parts, which leaves a moment in which another
    writer of the same name would not be noticed: large objects belong under names that nobody else uses.

    Parts of uploads that were cut off by a kill stay in the bucket, seen by nobody and paid for, until a
    rule of the bucket removes them: the client library has no request for it. Uploads that failed while the
    process lives are taken back.

    Args:
        address: where it is, as a URL or parsed.

    Raises:
        InvalidInput: not a URL of an object store, or with options that it cannot have.
        Unsupported: the client library is not installed.
    """

    def __init__(self, address: Address | str) -> None:
        self._address = parse_address(address) if isinstance(address, str) else address
        self.url = self._address.url
        self.properties = Properties(
            survives_host=True,
            parallel_reads=self._address.parallel,
            read_bytes=READ_BYTES,
            lends_memory=True,
        )
        self._library = load_library()
        self._clients = Clients(self._address)
        self._retries = Retries(self._address, self._clients)
        self._logs = logs_at(self.url, self._load_log, self._save_log)

    @property
    def address(self) -> Address:
        """Where it is."""
        return self._address

    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`; sent from `data` itself, without a copy."""
        check_name(name)
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._logs.forget(name)
        failpoint("store.written")
        if if_absent and len(view) <= CREATE_BYTES:
            self._create(name, view)
        else:
            if if_absent:
                self._check_free(name)
            self._send(Request("write", name, len(view)), view)
        failpoint("store.linked")

    def put_parts(
        self, name: str, parts: Iterable[Buffer], num_bytes: int, *, if_absent: bool = False
    ) -> None:
        """See `Store.put_parts`; holds as many parts of the upload as are sent at once, and one more."""
        check_name(name)
        if num_bytes <= (CREATE_BYTES if if_absent else self._address.part_bytes):
            super().put_parts(name, parts, num_bytes, if_absent=if_absent)
            return
        if if_absent:
            self._check_free(name)
        self._logs.forget(name)
        source = Segments(name, parts, num_bytes, self._part_bytes(num_bytes))
        request = Request("write", name, num_bytes, num_tries=1)
        failpoint("store.written")
        try:
            # Not tried again as a whole: the parts are gone. The client tries each request again.
            self._upload(self._clients.get(patient=True), name, iter(source), num_bytes)
        except Exception as error:
            if source.error is not None:
                raise source.error from None
            if not isinstance(error, self._clients.refusals) or isinstance(error, HoldfastError):
                raise
            raise self._retries.failure(request, classify(error)) from None
        failpoint("store.linked")

    def link(self, source: str, name: str) -> None:
        """See `Store.link`: the server copies, so the bytes are there twice, but are sent by nobody.

        Raises:
            Unsupported: Azure, which copies at a time of its own, and objects too large for one request.
        """
        check_name(source)
        check_name(name)
        num_bytes = self.size(source)
        if num_bytes is None:
            raise not_found(self._address, source)
        most = _MAX_COPY_BYTES.get(self._address.protocol, num_bytes)
        if self._address.protocol == AZURE or num_bytes > most:
            raise Unsupported(
                f"{self._place(source)} ({num_bytes} bytes) cannot be copied by the server in one step; put "
                "the bytes instead.",
                key=source,
            )
        key_from, key_to = self._address.key(source), self._address.key(name)
        self._logs.forget(name)
        self._retries.ask(
            Request("copy", source), lambda client: self._library.copy(client, key_from, key_to)
        )
        if self.size(name) != num_bytes:
            message = f"The copy {self._place(name)} is not as long as {self._place(source)}."
            raise RetryLater(message, key=name)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        check_name(name)
        self._logs.flush(name)
        return self._get(name)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`; a long read is split into ranges that are fetched at once.

        The bytes are as the server sent them: a byte that was flipped on the way is not noticed here, but by
        whoever compares hashes.
        """
        check_name(name)
        self._logs.flush(name)
        if not len(buffer) and self.size(name) is None:
            raise not_found(self._address, name)
        for _ in range(_MAX_CHANGES):
            versions = self._read_ranges(name, offset, buffer)
            if len(versions) < 2:
                return
        raise RetryLater(f"{self._place(name)} was replaced again and again while it was read.", key=name)

    def lend(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """See `Store.lend`: the client's own memory, by one request."""
        check_name(name)
        self._logs.flush(name)
        if not num_bytes and self.size(name) is None:
            raise not_found(self._address, name)
        return self._fetch(name, offset, num_bytes)[0] if num_bytes else memoryview(b"")

    def append(self, name: str, data: bytes) -> None:
        """See `Store.append`: kept in memory and sent in the background, at `flush` and at the process's end.

        Reads through a store of this process see it at once; a killed process loses the last seconds.
        """
        check_name(name)
        check_process(self._address.place)
        self._logs.append(name, data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`.

        Raises:
            NotFound: the bucket does not exist.
            RetryLater: the store failed.
        """
        self._logs.flush(check_prefix(prefix))
        folder = self._address.key(prefix).rpartition("/")[0] if prefix else self._address.prefix
        found = self._retries.ask(Request("list", prefix), lambda client: self._listed(client, folder))
        return (entry for entry in found if entry.name.startswith(prefix))

    def size(self, name: str) -> int | None:
        """See `Store.size`.

        Raises:
            RetryLater: the store failed.
        """
        check_name(name)
        self._logs.flush(name)
        key = self._address.key(name)
        try:
            return self._retries.ask(
                Request("look at", name), lambda client: self._library.head(client, key)
            )["size"]
        except NotFound:
            return None

    def delete(self, name: str) -> None:
        """See `Store.delete`.

        Raises:
            RetryLater: the store failed; the object may be there or not.
        """
        check_name(name)
        self._logs.forget(name)
        key = self._address.key(name)
        try:
            self._retries.ask(Request("delete", name), lambda client: self._library.delete(client, key))
        except NotFound:
            return

    def sweep(self, prefix: str = "") -> None:
        """See `Store.sweep`; nothing can be done here, as the class's text says."""
        check_prefix(prefix)

    def check(self) -> None:
        """See `Store.check`: makes a small object, tries to make it once more, and deletes it."""
        name = f"checks/{secrets.token_hex(8)}.txt"
        first, second = secrets.token_bytes(16).hex().encode(), secrets.token_bytes(16).hex().encode()
        list(self.list("checks/"))  # tells a missing bucket, which a put cannot tell from other troubles
        self.put(name, first, if_absent=True)
        try:
            self.put(name, second, if_absent=True)
        except Conflict:
            return
        finally:
            self.delete(name)
        raise Unsupported(
            f"The server of {self._address.place} replaces objects that it was told to leave alone (it "
            "ignores 'If-None-Match: *'), so two starts of a run could not be told apart and could damage "
            "each other's checkpoints. Nothing but a test object was written, and it is gone. Use another "
            "server, a newer version of it, or a way to it on which nothing rewrites requests."
        )

    def flush(self) -> None:
        """See `Store.flush`.

        Blocks: until the logs are written, at most the address's time limit each.
        """
        self._logs.flush()

    def close(self) -> None:
        """See `Store.close`."""
        try:
            self.flush()
        finally:
            self._clients.drop()

    # -- writing ---------------------------------------------------------------------------------------------

    def _send(self, request: Request, data: Buffer) -> None:
        """Write an object, whatever its name holds."""
        num_bytes = len(data)
        is_large = num_bytes > self._address.part_bytes
        self._retries.ask(
            request, lambda client: self._upload(client, request.name, data, num_bytes), patient=is_large
        )

    def _upload(self, client: Any, name: str, body: Any, num_bytes: int) -> None:
        part_bytes = self._part_bytes(num_bytes)
        self._library.put(
            client,
            self._address.key(name),
            body,
            use_multipart=num_bytes > self._address.part_bytes,
            chunk_size=part_bytes,
            max_concurrency=self._address.parallel,
        )

    def _part_bytes(self, num_bytes: int) -> int:
        """Bytes of a part: the address's, or more where a large object would have too many."""
        least = -(-num_bytes // _MAX_PARTS)
        return max(self._address.part_bytes, -(-least // (1 << 20)) << 20)

    def _create(self, name: str, view: memoryview) -> None:
        """Take a free name by one request; find out whose it is where the answer leaves that open."""

        def create(client: Any) -> bool:
            try:
                self._library.put(client, self._address.key(name), view, mode="create", use_multipart=False)
            except self._clients.refusals as error:
                # Also a plain refusal may be about our own write: an earlier try's, whose answer was lost.
                refusal = classify(error)
                if refusal.kind not in (Kind.TAKEN, Kind.PASSING):
                    raise
                if (is_ours := self._is_ours(client, name, view)) is not None:
                    return is_ours
                if refusal.kind is Kind.TAKEN:  # somebody was writing it, or has deleted it
                    raise TryAgain(refusal.why) from error
                raise
            return True

        if not self._retries.ask(Request("write", name, len(view)), create):
            raise self._taken(name)

    def _is_ours(self, client: Any, name: str, view: memoryview) -> bool | None:
        """Whether the object holds our bytes; None if there is none, or that cannot be seen now."""
        try:
            found = self._library.get(client, self._address.key(name))
            return found.meta["size"] == len(view) and memoryview(found.bytes()) == view
        except self._clients.refusals:
            return None

    def _check_free(self, name: str) -> None:
        if self.size(name) is not None:
            raise self._taken(name)

    # -- reading ---------------------------------------------------------------------------------------------

    def _get(self, name: str, limit_s: float | None = None) -> bytes:
        key = self._address.key(name)
        return self._retries.ask(
            Request("read", name, limit_s=limit_s),
            lambda client: self._read_whole(client, key, name),
        )

    def _read_whole(self, client: Any, key: str, name: str) -> bytes:
        answer = self._library.get(client, key)
        check_size(name, answer.meta["size"])
        return bytes(answer.bytes())

    def _read_ranges(self, name: str, offset: int, buffer: memoryview) -> set[str | None]:
        """Fill the buffer; returns the versions of the object that its ranges came from."""
        starts = range(0, len(buffer), READ_BYTES)
        if len(starts) < 2:
            return {self._read_range(name, offset, buffer)} if len(buffer) else set()
        versions = set()
        with ThreadPoolExecutor(min(self._address.parallel, len(starts)), "holdfast-range") as pool:
            ranges = [
                pool.submit(self._read_range, name, offset + start, buffer[start : start + READ_BYTES])
                for start in starts
            ]
            try:
                for one in ranges:
                    versions.add(one.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return versions

    def _read_range(self, name: str, offset: int, buffer: memoryview) -> str | None:
        """Fill a short buffer; returns the object's version."""
        data, version = self._fetch(name, offset, len(buffer))
        buffer[:] = data
        return version

    def _fetch(self, name: str, offset: int, num_bytes: int) -> tuple[memoryview, str | None]:
        """A range of an object by one request, and the object's version."""
        key = self._address.key(name)

        def fetch(client: Any) -> tuple[memoryview, str | None]:
            found = self._library.get(client, key, options={"range": (offset, offset + num_bytes)})
            return memoryview(found.bytes()), found.meta["e_tag"]

        none: tuple[memoryview, str | None] = memoryview(b""), None
        data, version = self._retries.ask(Request("read", name, num_bytes), fetch, past_end=none)
        if len(data) < num_bytes:
            raise Corrupt(
                f"{self._place(name)} ends at byte {self.size(name)}; {num_bytes} bytes at {offset} were "
                f"wanted, {len(data)} are there. The object is not the one that was written.",
                key=name,
            )
        return data, version

    def _listed(self, client: Any, folder: str) -> list[Entry]:
        skip = len(self._address.prefix) + 1 if self._address.prefix else 0
        found = []
        for page in self._library.list(client, prefix=folder or None, chunk_size=1000):
            for one in page:
                name = one["path"][skip:]
                if name and not name.endswith("/"):  # consoles make such objects to show folders
                    found.append(Entry(name, one["size"]))
        return found

    def _load_log(self, name: str, limit_s: float | None) -> bytes | None:
        try:
            return self._get(name, limit_s)
        except NotFound:
            return None

    def _save_log(self, name: str, text: bytes, limit_s: float | None) -> None:
        self._send(Request("write", name, len(text), limit_s), text)

    def _taken(self, name: str) -> Conflict:
        return Conflict(f"{self._place(name)} exists already; it was left alone.", key=name)

    def _place(self, name: str) -> str:
        return f"{self._address.place}/{name}"
