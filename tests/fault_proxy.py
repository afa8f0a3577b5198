"""HTTP proxy in front of a local server that injects faults on command: resets, stalls, flipped bits, errors.

The Host header is forwarded unchanged, so signatures of requests stay valid. Each connection has a thread;
only the standard library is used.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

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
class InjectedFault:
    """A fault, and the requests that have it."""

    fault: str  # one of `FAULTS`, or a status code
    method: str = ""  # HTTP method; "" for all
    target: str = ""  # regular expression that is searched for in the path and query
    header: str = ""  # regular expression that is searched for in the request line and headers
    nth: int = 1  # first matching request that fails, counted from now
    times: int | None = 1  # number of requests that fail from then on; None for all
    after_bytes: int = 0  # position in the body, for faults that happen in a body
    seconds: float = 30.0  # duration of a stall
    code: str = ""  # error code in the body of a response with a status code
    gate: Gate | None = None  # of a response that is held

    def matches(self, head: str, method: str, target: str) -> bool:
        """Return True if a request with this head has the fault, as far as numbers do not matter."""
        return (
            self.times != 0
            and self.method in ("", method)
            and re.search(self.target, target) is not None
            and re.search(self.header, head) is not None
        )


class FaultProxy:
    """Proxy on 127.0.0.1 that forwards requests to a server, and breaks those that `inject` selects.

    Its port is `listen_on`, or a free one: `open_store(f"s3://bucket/run?endpoint_url={proxy.url}")`.
    """

    def __init__(self, host: str, port: int, *, listen_on: int = 0) -> None:
        self.bytes_per_s = 0.0  # bandwidth limit of each connection's bodies; 0 for no limit
        self.stripped: frozenset[str] = frozenset()  # request headers to remove, in lower case
        self.server = host, port
        self.closed = threading.Event()
        self.sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._faults: list[InjectedFault] = []
        self._requests: list[ProxiedRequest] = []
        self._listener = _Listener(("127.0.0.1", listen_on), partial(_Connection, self))
        self.port: int = self._listener.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def inject(self, fault: str, **options: Any) -> None:
        """Make matching requests fail; the options are those of `InjectedFault`."""
        if fault not in FAULTS and not _STATUS.fullmatch(fault):
            known = ", ".join(FAULTS)
            raise InvalidInput(f"Unknown fault {fault!r}: use {known}, or a status code from 400 to 599.")
        with self._lock:
            self._faults.append(InjectedFault(fault, **options))

    def hold(self, **options: Any) -> Gate:
        """Delay the server's response to one request until the returned gate opens."""
        gate = Gate()
        with self._lock:
            self._faults.append(InjectedFault("hold", gate=gate, **options))
        return gate

    def clear(self) -> None:
        """Remove all faults and open all gates. Recorded requests stay."""
        with self._lock:
            gates = [fault.gate for fault in self._faults if fault.gate]
            self._faults = []
        for gate in gates:
            gate.opened.set()
        self.bytes_per_s, self.stripped = 0.0, frozenset()

    def requests(self, method: str | None = None) -> list[ProxiedRequest]:
        """Return all recorded requests, or those of one method."""
        with self._lock:
            return [one for one in self._requests if method in (None, one.method)]

    def clear_requests(self) -> None:
        """Delete the recorded requests."""
        with self._lock:
            self._requests = []

    def close(self) -> None:
        """Break all connections and stop, after all threads have ended."""
        if self.closed.is_set():
            return
        self.closed.set()
        self.clear()
        self._listener.shutdown()
        self._thread.join()
        for one in list(self.sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.server_close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def pick(self, method: str, target: str, head: str) -> InjectedFault | None:
        """Record a request and return the first fault that applies to it."""
        with self._lock:
            hit = None
            for fault in self._faults:
                if not fault.matches(head, method, target):
                    continue
                if fault.nth > 1:
                    fault.nth -= 1
                    continue
                fault.times = None if fault.times is None else fault.times - 1
                hit = fault
                break
            self._requests.append(ProxiedRequest(method, target, hit.fault if hit else None))
            return hit


class _Listener(ThreadingHTTPServer):
    """Listener whose connections are closed without a farewell, and which logs no broken ones."""

    request_queue_size = 128
    daemon_threads = False

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error."""


class _Connection(BaseHTTPRequestHandler):
    """Connection of a client, whose requests are forwarded over one connection to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, proxy: FaultProxy, *arguments: Any) -> None:
        self._proxy = proxy
        self._server = http.client.HTTPConnection(*proxy.server)
        super().__init__(*arguments)

    def handle(self) -> None:
        self._server.connect()
        both = {self.connection, self._server.sock}
        self._proxy.sockets |= both
        try:
            if not self._proxy.closed.is_set():
                super().handle()
        finally:
            self._proxy.sockets -= both
            self._server.close()

    def forward(self) -> None:
        """Forward a request and its response, with the fault that applies to them."""
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        fault = self._proxy.pick(self.command, self.path, f"{self.requestline}\r\n{head}")
        if fault and _STATUS.fullmatch(fault.fault):
            self._respond(fault)
            return
        if fault and fault.fault == "stall":
            self._proxy.closed.wait(fault.seconds)
        if fault and fault.fault in ("reset-before", "stall"):
            self._reset()
            return
        try:
            self._send_request(fault)
            self._forward_response(self._server.getresponse(), fault)
        except (OSError, http.client.HTTPException):
            if fault and fault.fault == "truncate":
                self.close_connection = True
            else:
                self._reset()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_OPTIONS = forward

    def _send_request(self, fault: InjectedFault | None) -> None:
        left_out = self._proxy.stripped | {"expect"}  # the client was told to send its body
        self._server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in left_out:
                self._server.putheader(name, value)
        self._server.endheaders()
        framed = _framing(self.headers)
        for data in self._faulty(self._request_body(), fault, "reset-request", "corrupt-request"):
            self._server.send(framed(data))

    def _forward_response(self, response: http.client.HTTPResponse, fault: InjectedFault | None) -> None:
        if fault and fault.gate:
            fault.gate.reached.set()
            fault.gate.opened.wait()
        if fault and fault.fault == "reset-after":
            raise ConnectionError
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            self.send_header(name, value)
        self.end_headers()
        framed = _framing(response.headers)
        pieces = iter(lambda: bytearray(response.read1(_CHUNK_BYTES)), b"")
        if self.command != "HEAD" and response.status not in (204, 304):
            for data in self._faulty(chain(pieces, _last(response.headers)), fault, "truncate", "corrupt"):
                self.wfile.write(framed(data))
        response.read()

    def _faulty(
        self, pieces: Iterable[bytearray], fault: InjectedFault | None, cutting: str, corrupting: str
    ) -> Iterator[bytearray]:
        """Yield the pieces of a body, with its fault and at the bandwidth of the proxy."""
        kind, done, at = fault.fault if fault else "", 0, fault.after_bytes if fault else 0
        for data in pieces:
            if kind == cutting and done + len(data) > at:
                yield data[: at - done]
                raise ConnectionError
            if kind == corrupting and done <= at < done + len(data):
                data[at - done] ^= 1
            yield data
            done += len(data)
            if self._proxy.bytes_per_s:
                self._proxy.closed.wait(len(data) / self._proxy.bytes_per_s)

    def _request_body(self) -> Iterator[bytearray]:
        left = int(self.headers.get("Content-Length", 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while left := int(self.rfile.readline().partition(b";")[0], 16):
                yield bytearray(self.rfile.read(left))
                self.rfile.readline()
            while self.rfile.readline() not in (b"\r\n", b""):  # trailers
                continue
            yield bytearray()
        while left:
            data = bytearray(self.rfile.read(min(left, _CHUNK_BYTES)))
            if not data:
                raise ConnectionError
            left -= len(data)
            yield data

    def _respond(self, fault: InjectedFault) -> None:
        """Respond with the fault's status code in place of the server."""
        for _ in self._request_body():
            continue
        code = fault.code or _CODES.get(fault.fault, "InjectedFault")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected by a test</Message></Error>"
        self.send_response_only(int(fault.fault), "Injected fault")
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def _reset(self) -> None:
        """Reset the client's connection at the end of this request."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _framing(headers: Message) -> Callable[[bytearray], bytes]:
    """Return a function that frames a piece of a body as its headers say. The last chunk is empty."""
    if "chunked" in headers.get("Transfer-Encoding", ""):
        return lambda data: b"%x\r\n%s\r\n" % (len(data), data)
    return bytes


def _last(headers: Message) -> list[bytearray]:
    return [bytearray()] if "chunked" in headers.get("Transfer-Encoding", "") else []
