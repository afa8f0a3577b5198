"""HTTP proxy in front of a local server that injects faults on command: resets, stalls, flipped bits, errors.

The Host header is forwarded unchanged, so signatures of requests stay valid. Each connection has a thread;
only the standard library is used.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader

from faulty_store import Gate
from holdfast.errors import InvalidInput

FAULTS = (
    "reset-before",  # the connection breaks before the server receives the request
    "reset-request",  # the connection breaks after `after_bytes` of the request's body
    "reset-after",  # the server handles the request, but its response is lost
    "stall",  # no response for `seconds`, then the connection breaks
    "truncate",  # the response's body stops after `after_bytes`
    "corrupt",  # one bit of the response's body is flipped, at byte `after_bytes`
    "corrupt-request",  # one bit of the request's body is flipped, at byte `after_bytes`
)
"""All faults except status codes, with which the proxy itself responds without contacting the server."""

_CODES = {"429": "TooManyRequests", "500": "InternalError", "503": "SlowDown"}
_CHUNK_BYTES = 64 << 10
_STATUS = re.compile(r"[45]\d\d")


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A request that reached the proxy, and the fault injected into it, if any."""

    method: str
    target: str
    fault: str | None = None


@dataclass(slots=True)
class _InjectedFault:
    fault: str
    method: str = ""
    target: str = ""
    header: str = ""
    skip: int = 0
    times: int | None = 1
    after_bytes: int = 0
    seconds: float = 30.0
    code: str = ""
    gate: Gate | None = None

    def matches(self, head: str, method: str, target: str) -> bool:
        return (
            self.times != 0
            and self.method in ("", method)
            and re.search(self.target, target) is not None
            and re.search(self.header, head) is not None
        )


class FaultProxy:
    """Proxy on 127.0.0.1 that forwards requests to a server, and breaks those that `inject` selects.

    Example:
        >>> with FaultProxy("127.0.0.1", 4566) as proxy:
        ...     proxy.inject("reset-after", method="PUT", target="manifest")
        ...     store = open_store(f"s3://bucket/run?endpoint_url={proxy.url}")

    Args:
        listen_on: port of the proxy; 0 for a free one.

    Attributes:
        latency_s: delay of every request.
        bytes_per_s: bandwidth limit of each connection's bodies; 0 for no limit.
        stripped: request headers to remove, in lower case.
    """

    def __init__(self, host: str, port: int, *, listen_on: int = 0) -> None:
        self.latency_s = 0.0
        self.bytes_per_s = 0.0
        self.stripped: frozenset[str] = frozenset()
        self._server = host, port
        self._lock = threading.Lock()
        self._faults: list[_InjectedFault] = []
        self._requests: list[ProxiedRequest] = []
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", listen_on), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._start(self._accept)

    def inject(
        self,
        fault: str,
        *,
        method: str = "",
        target: str = "",
        header: str = "",
        nth: int = 1,
        times: int | None = 1,
        after_bytes: int = 0,
        seconds: float = 30.0,
        code: str = "",
    ) -> None:
        """Make matching requests fail.

        Args:
            fault: one of `FAULTS`, or a status code.
            method: HTTP method to match; "" for all.
            target: regular expression that is searched for in the path and query.
            header: regular expression that is searched for in the request line and headers.
            nth: first matching request that fails, counted from now.
            times: number of requests that fail from then on; None for all.
            after_bytes: position in the body, for faults that happen in a body.
            seconds: duration of a stall.
            code: error code in the body of a response with a status code.

        Raises:
            InvalidInput: the fault is unknown.
        """
        if fault not in FAULTS and not _STATUS.fullmatch(fault):
            known = ", ".join(FAULTS)
            raise InvalidInput(f"Unknown fault {fault!r}: use {known}, or a status code from 400 to 599.")
        one = _InjectedFault(fault, method, target, header, nth - 1, times, after_bytes, seconds, code)
        with self._lock:
            self._faults.append(one)

    def hold(self, *, method: str = "", target: str = "", nth: int = 1) -> Gate:
        """Delay the server's response to one request until a gate opens. Arguments are those of `inject`.

        Returns:
            The gate at which the response waits.
        """
        gate = Gate()
        with self._lock:
            self._faults.append(_InjectedFault("hold", method, target, skip=nth - 1, gate=gate))
        return gate

    def clear(self) -> None:
        """Remove all faults and open all gates. Recorded requests stay."""
        with self._lock:
            gates = [fault.gate for fault in self._faults if fault.gate]
            self._faults = []
        for gate in gates:
            gate.opened.set()
        self.latency_s, self.bytes_per_s, self.stripped = 0.0, 0.0, frozenset()

    def requests(self, method: str | None = None) -> list[ProxiedRequest]:
        """Return all recorded requests, or those of one method."""
        with self._lock:
            return [one for one in self._requests if method in (None, one.method)]

    def clear_requests(self) -> None:
        """Delete the recorded requests."""
        with self._lock:
            self._requests = []

    def close(self) -> None:
        """Break all connections and stop.

        Blocks: until all threads have ended.
        """
        self._closed.set()
        self.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets, threads = list(self._sockets), list(self._threads)
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # -- connections -----------------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="holdfast-faultproxy", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._server) as server:
            both = {client, server}
            with self._lock:
                self._sockets |= both
            try:
                self._forward_all(client, server)
            finally:
                with self._lock:
                    self._sockets -= both

    def _forward_all(self, client: socket.socket, server: socket.socket) -> None:
        with client.makefile("rb") as requests, server.makefile("rb") as responses:
            while not self._closed.is_set() and self._forward(client, server, requests, responses):
                continue

    def _forward(
        self,
        client: socket.socket,
        server: socket.socket,
        requests: BufferedReader,
        responses: BufferedReader,
    ) -> bool:
        """Forward one request and its response; return True if the connection can carry another."""
        head = _read_head(requests)
        if head is None:
            return False
        fault = self._pick(head)
        if self.latency_s:
            self._closed.wait(self.latency_s)
        if fault and _STATUS.fullmatch(fault.fault):
            return self._respond(client, requests, head, fault)
        if fault and fault.fault in ("reset-before", "stall"):
            if fault.fault == "stall":
                self._closed.wait(fault.seconds)
            return _reset(client)
        if "expect" in head.headers:  # the client waits for permission to send its body
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        server.sendall(head.without(self.stripped | {"expect"}))
        is_cut = self._forward_body(requests, server, head, fault, is_request=True)
        if is_cut or (response := _read_head(responses)) is None:
            return _reset(client)
        return self._forward_response(client, responses, head, response, fault)

    def _forward_response(
        self,
        client: socket.socket,
        responses: BufferedReader,
        head: _Head,
        response: _Head,
        fault: _InjectedFault | None,
    ) -> bool:
        if fault and fault.gate:
            fault.gate.reached.set()
            fault.gate.opened.wait()
        if fault and fault.fault == "reset-after":
            return _reset(client)
        client.sendall(response.raw)
        if head.method == "HEAD" or response.words[1] in ("204", "304"):
            return True
        return not self._forward_body(responses, client, response, fault, is_request=False)

    def _pick(self, head: _Head) -> _InjectedFault | None:
        """Record a request and return the first fault that applies to it."""
        text = head.raw.decode("latin-1")
        with self._lock:
            hit = None
            for fault in self._faults:
                if not fault.matches(text, head.method, head.target):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times = None if fault.times is None else fault.times - 1
                hit = fault
                break
            self._requests.append(ProxiedRequest(head.method, head.target, hit.fault if hit else None))
            return hit

    def _respond(
        self, client: socket.socket, requests: BufferedReader, head: _Head, fault: _InjectedFault
    ) -> bool:
        """Respond with the fault's status code in place of the server."""
        for _ in _Chunks(requests, head.headers):
            continue
        code = fault.code or _CODES.get(fault.fault, "InjectedFault")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected by a test</Message></Error>"
        client.sendall(
            f"HTTP/1.1 {fault.fault} Injected fault\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{'' if head.method == 'HEAD' else body}".encode()
        )
        return True

    def _forward_body(
        self,
        source: BufferedReader,
        target: socket.socket,
        head: _Head,
        fault: _InjectedFault | None,
        *,
        is_request: bool,
    ) -> bool:
        """Forward a body; return True if a fault cut it off."""
        kind = fault.fault if fault else None
        is_cut = kind == ("reset-request" if is_request else "truncate")
        is_corrupted = kind == ("corrupt-request" if is_request else "corrupt")
        done, at = 0, fault.after_bytes if fault else 0
        for chunk in _Chunks(source, head.headers):
            if is_cut and done + len(chunk.data) > at:
                target.sendall(chunk.data[: at - done])
                return True
            if is_corrupted and done <= at < done + len(chunk.data):
                chunk.data[at - done] ^= 1
            target.sendall(chunk.prefix + chunk.data + chunk.suffix)
            done += len(chunk.data)
            if self.bytes_per_s:
                self._closed.wait(len(chunk.data) / self.bytes_per_s)
        return False


@dataclass(frozen=True, slots=True)
class _Head:
    raw: bytes
    words: tuple[str, ...]
    headers: dict[str, str]

    @property
    def method(self) -> str:
        return self.words[0]

    @property
    def target(self) -> str:
        return self.words[1]

    def without(self, names: frozenset[str]) -> bytes:
        """Return the bytes of the head without some headers."""
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(
            line
            for line in lines
            if line.partition(b":")[0].decode("latin-1").lower() not in names or not line
        )


@dataclass(slots=True)
class _Chunk:
    """Bytes of a body, and the framing before and after them."""

    data: bytearray
    prefix: bytes = b""
    suffix: bytes = b""


def _read_head(stream: BufferedReader) -> _Head | None:
    raw = b""
    while not raw.endswith(b"\r\n\r\n"):
        line = stream.readline(_CHUNK_BYTES)
        if not line:
            return None
        raw = b"" if raw + line == b"\r\n" else raw + line  # blank lines may precede a request
    first, *lines = raw.decode("latin-1").rstrip().split("\r\n")
    fields = (line.partition(":") for line in lines)
    return _Head(raw, tuple(first.split(" ")), {name.lower(): value.strip() for name, _, value in fields})


class _Chunks:
    """Iterator over a body with a Content-Length or in chunked encoding."""

    def __init__(self, stream: BufferedReader, headers: dict[str, str]) -> None:
        self._stream = stream
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "")
        self._left = int(headers.get("content-length", 0))

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> _Chunk:
        if self._is_chunked:
            return self._next_chunk()
        if not self._left:
            raise StopIteration
        data = bytearray(self._stream.read(min(self._left, _CHUNK_BYTES)))
        if not data:
            raise ConnectionError("the peer closed the connection in the middle of a body")
        self._left -= len(data)
        return _Chunk(data)

    def _next_chunk(self) -> _Chunk:
        if self._left < 0:
            raise StopIteration
        line = self._stream.readline()
        num_bytes = int(line.partition(b";")[0] or b"0", 16)
        if num_bytes:
            return _Chunk(bytearray(self._stream.read(num_bytes)), line, self._stream.read(2))
        trailers = b""
        while (one := self._stream.readline()) not in (b"\r\n", b""):
            trailers += one
        self._left = -1
        return _Chunk(bytearray(), line, trailers + b"\r\n")


def _reset(client: socket.socket) -> bool:
    """Reset the client's connection; return False, since it cannot carry another request."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
    client.close()
    return False
