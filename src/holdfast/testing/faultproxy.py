"""A proxy between an HTTP client and a server on this machine that breaks what it is told to break.

It passes the Host header on as it is, so signatures of requests stay valid. One thread a connection, standard
library only. As a program: `python -m holdfast.testing.faultproxy HOST:PORT --fault 503 --method PUT`.
"""

from __future__ import annotations

import argparse
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader

from holdfast.errors import InvalidInput
from holdfast.testing.faulty import Gate

FAULTS = (
    "reset-before",  # the connection breaks before the server sees the request
    "reset-request",  # ... after `after_bytes` of the request's body
    "reset-after",  # the server did it, and its answer is lost
    "stall",  # nothing for `seconds`, then the connection breaks
    "truncate",  # the answer's body stops after `after_bytes`
    "corrupt",  # one bit of the answer's body is flipped, `after_bytes` into it
    "corrupt-request",  # one bit of the request's body is flipped
)
"""Every fault there is, beside status codes, which are answered here without asking the server."""

_CODES = {"429": "TooManyRequests", "500": "InternalError", "503": "SlowDown"}
_CHUNK_BYTES = 64 << 10
_STATUS = re.compile(r"[45]\d\d")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request that came, and the fault that hit it, if any."""

    method: str
    target: str
    fault: str | None = None


@dataclass(slots=True)
class _Order:
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
    """Listens on 127.0.0.1 and passes everything on to a server, but for what it was ordered to break.

    Example:
        >>> with FaultProxy("127.0.0.1", 4566) as proxy:
        ...     proxy.order("reset-after", method="PUT", target="manifest")
        ...     store = open_store(f"s3://bucket/run?endpoint_url={proxy.url}")

    Args:
        host: of the server.
        port: of the server.
        listen_on: port of the proxy; 0 for a free one.

    Attributes:
        latency_s: seconds by which every request is delayed.
        bytes_per_s: bound on the speed of each connection's bodies; 0 for none.
        stripped: names of request headers that are left out, in lower case.
    """

    def __init__(self, host: str, port: int, *, listen_on: int = 0) -> None:
        self.latency_s = 0.0
        self.bytes_per_s = 0.0
        self.stripped: frozenset[str] = frozenset()
        self._server = host, port
        self._lock = threading.Lock()
        self._orders: list[_Order] = []
        self._exchanges: list[Exchange] = []
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", listen_on), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._start(self._accept)

    def order(
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
        """Have requests fail.

        Args:
            fault: one of `FAULTS`, or a status code.
            method: only this method; "" for all.
            target: only paths and queries in which this regular expression is found.
            header: only requests in whose head this regular expression is found.
            nth: first matching request that is hit, counted from now.
            times: how many are hit from there; None for all.
            after_bytes: where in the body it happens, for faults that happen there.
            seconds: how long a stall lasts.
            code: the error's name in the answer to a status code.

        Raises:
            InvalidInput: there is no such fault.
        """
        if fault not in FAULTS and not _STATUS.fullmatch(fault):
            known = ", ".join(FAULTS)
            raise InvalidInput(f"There is no fault {fault!r}; give {known} or a status code from 400 on.")
        one = _Order(fault, method, target, header, nth - 1, times, after_bytes, seconds, code)
        with self._lock:
            self._orders.append(one)

    def hold(self, *, method: str = "", target: str = "", nth: int = 1) -> Gate:
        """Have the server's answer to one request wait; arguments as in `order`.

        Returns:
            The gate where it waits.
        """
        gate = Gate()
        with self._lock:
            self._orders.append(_Order("hold", method, target, skip=nth - 1, gate=gate))
        return gate

    def clear(self) -> None:
        """Take all orders back and open all gates; what was recorded stays."""
        with self._lock:
            gates = [order.gate for order in self._orders if order.gate]
            self._orders = []
        for gate in gates:
            gate.opened.set()
        self.latency_s, self.bytes_per_s, self.stripped = 0.0, 0.0, frozenset()

    def exchanges(self, method: str | None = None) -> list[Exchange]:
        """All requests so far, or those of one method."""
        with self._lock:
            return [one for one in self._exchanges if method in (None, one.method)]

    def forget(self) -> None:
        """Drop what was recorded."""
        with self._lock:
            self._exchanges = []

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
                self._exchange_all(client, server)
            finally:
                with self._lock:
                    self._sockets -= both

    def _exchange_all(self, client: socket.socket, server: socket.socket) -> None:
        with client.makefile("rb") as asked, server.makefile("rb") as answered:
            while not self._closed.is_set() and self._exchange(client, server, asked, answered):
                continue

    def _exchange(
        self, client: socket.socket, server: socket.socket, asked: BufferedReader, answered: BufferedReader
    ) -> bool:
        """One request and its answer; whether the connection can carry another."""
        head = _read_head(asked)
        if head is None:
            return False
        order = self._pick(head)
        if self.latency_s:
            self._closed.wait(self.latency_s)
        if order and _STATUS.fullmatch(order.fault):
            return self._refuse(client, asked, head, order)
        if order and order.fault in ("reset-before", "stall"):
            if order.fault == "stall":
                self._closed.wait(order.seconds)
            return _reset(client)
        if "expect" in head.headers:  # the client waits for leave to send its body
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        server.sendall(head.without(self.stripped | {"expect"}))
        is_cut = self._pass_body(asked, server, head, order, "request")
        if is_cut or (answer := _read_head(answered)) is None:
            return _reset(client)
        return self._answer(client, answered, head, answer, order)

    def _answer(
        self,
        client: socket.socket,
        answered: BufferedReader,
        head: _Head,
        answer: _Head,
        order: _Order | None,
    ) -> bool:
        if order and order.gate:
            order.gate.reached.set()
            order.gate.opened.wait()
        if order and order.fault == "reset-after":
            return _reset(client)
        client.sendall(answer.raw)
        if head.method == "HEAD" or answer.words[1] in ("204", "304"):
            return True
        return not self._pass_body(answered, client, answer, order, "")

    def _pick(self, head: _Head) -> _Order | None:
        text = head.raw.decode("latin-1")
        with self._lock:
            hit = None
            for order in self._orders:
                if not order.matches(text, head.method, head.target):
                    continue
                if order.skip:
                    order.skip -= 1
                    continue
                order.times = None if order.times is None else order.times - 1
                hit = order
                break
            self._exchanges.append(Exchange(head.method, head.target, hit.fault if hit else None))
            return hit

    def _refuse(self, client: socket.socket, asked: BufferedReader, head: _Head, order: _Order) -> bool:
        for _ in _Chunks(asked, head.headers):
            continue
        code = order.code or _CODES.get(order.fault, "InjectedFault")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>"
        client.sendall(
            f"HTTP/1.1 {order.fault} Told to\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{'' if head.method == 'HEAD' else body}".encode()
        )
        return True

    def _pass_body(
        self, source: BufferedReader, target: socket.socket, head: _Head, order: _Order | None, side: str
    ) -> bool:
        """Pass a body on; True if it was cut off as ordered."""
        fault = order.fault if order else None
        is_cut = fault == ("reset-request" if side else "truncate")
        is_spoilt = fault == ("corrupt-request" if side else "corrupt")
        done, at = 0, order.after_bytes if order else 0
        for chunk in _Chunks(source, head.headers):
            if is_cut and done + len(chunk.data) > at:
                target.sendall(chunk.data[: at - done])
                return True
            if is_spoilt and done <= at < done + len(chunk.data):
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
        """The bytes of the head, less some headers."""
        lines = self.raw.split(b"\r\n")
        return b"\r\n".join(
            line
            for line in lines
            if line.partition(b":")[0].decode("latin-1").lower() not in names or not line
        )


@dataclass(slots=True)
class _Chunk:
    """Some bytes of a body, with what frames them."""

    data: bytearray
    prefix: bytes = b""
    suffix: bytes = b""


def _read_head(stream: BufferedReader) -> _Head | None:
    raw = b""
    while not raw.endswith(b"\r\n\r\n"):
        line = stream.readline(_CHUNK_BYTES)
        if not line:
            return None
        raw = b"" if raw + line == b"\r\n" else raw + line  # blank lines may stand between requests
    first, *lines = raw.decode("latin-1").rstrip().split("\r\n")
    fields = (line.partition(":") for line in lines)
    return _Head(raw, tuple(first.split(" ")), {name.lower(): value.strip() for name, _, value in fields})


class _Chunks:
    """Iterates over a body, however it is framed."""

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
            message = "the peer closed in the middle of a body"
            raise ConnectionError(message)
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
    """Have the client see a broken connection; False, since nothing can follow."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
    client.close()
    return False


def main(argv: list[str] | None = None) -> None:
    """Run a proxy until the process is stopped, and print each request."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.testing.faultproxy", description=__doc__)
    parser.add_argument("server", help="HOST:PORT of the server")
    parser.add_argument("--port", type=int, default=0, help="port of the proxy; a free one if left out")
    parser.add_argument("--fault", help=f"{', '.join(FAULTS)} or a status code")
    parser.add_argument("--method", default="", help="only requests of this method")
    parser.add_argument("--target", default="", help="only paths and queries that match this expression")
    parser.add_argument("--nth", type=int, default=1, help="first matching request that is hit")
    parser.add_argument("--times", type=int, help="how many are hit; all if left out")
    parser.add_argument("--after-bytes", type=int, default=0, help="where in the body it happens")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long a stall lasts")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds by which each request is delayed")
    parser.add_argument("--bytes-per-s", type=float, default=0.0, help="bound on each connection's speed")
    args = parser.parse_args(argv)
    host, _, port = args.server.rpartition(":")
    with FaultProxy(host or "127.0.0.1", int(port), listen_on=args.port) as proxy:
        proxy.latency_s, proxy.bytes_per_s = args.latency, args.bytes_per_s
        if args.fault:
            proxy.order(
                args.fault,
                method=args.method,
                target=args.target,
                nth=args.nth,
                times=args.times,
                after_bytes=args.after_bytes,
                seconds=args.seconds,
            )
        sys.stdout.write(f"{proxy.url}\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            _print_exchanges(proxy)


def _print_exchanges(proxy: FaultProxy) -> None:
    while True:
        time.sleep(0.2)
        for one in proxy.exchanges():
            sys.stdout.write(f"{one.method} {one.target} {one.fault or ''}\n")
        proxy.forget()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
