"""S3 server that discards uploads and serves made-up bytes, so that the client is the limit.

A key exists from the end of its upload to its deletion, and contains the bytes of `TILE` again and again. It
listens on 127.0.0.1: `python null_server.py PORT NUM_BYTES`.
"""

from __future__ import annotations

import random
import re
import socket
import sys
import threading
from contextlib import suppress

TILE = random.Random(1).randbytes(16 << 20)
"""What every object is made of."""
_TAG = "9bb58f26192e4ba00f01e2e7b136bbd8"
_FACTS = f'ETag: "{_TAG}"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nx-amz-request-id: 1\r\n'


class Connection:
    """One connection of a client; bodies are received into memory that nothing reads.

    Args:
        keys: the keys that exist, of all connections.
    """

    def __init__(self, end: socket.socket, num_bytes: int, keys: set[str]) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._num_bytes = num_bytes
        self._keys = keys
        self._waiting = bytearray()
        self._waste = memoryview(bytearray(1 << 20))

    def serve(self) -> None:
        """Answer requests until the client has gone."""
        with self._end, suppress(OSError):
            while (head := self._head()) is not None:
                self._answer(*head)

    def _head(self) -> tuple[str, str, dict[str, str]] | None:
        while b"\r\n\r\n" not in self._waiting:
            data = self._end.recv(65536)
            if not data:
                return None
            self._waiting += data
        text, _, rest = bytes(self._waiting).partition(b"\r\n\r\n")
        self._waiting = bytearray(rest)
        first, *lines = text.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        fields = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in fields}
        self._swallow(int(headers.get("content-length", 0)))
        return method, target, headers

    def _swallow(self, num_bytes: int) -> None:
        there = min(num_bytes, len(self._waiting))
        del self._waiting[:there]
        left = num_bytes - there
        while left:
            got = self._end.recv_into(self._waste, min(left, len(self._waste)))
            if not got:
                message = "the client has gone"
                raise ConnectionError(message)
            left -= got

    def _answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        key, _, query = target.partition("?")
        if method in ("GET", "HEAD") and key not in self._keys:
            self._end.sendall(f"HTTP/1.1 404 Not Found\r\n{_FACTS}Content-Length: 0\r\n\r\n".encode())
        elif method == "GET":
            self._send_range(headers.get("range", ""))
        elif method == "HEAD":
            length = f"Content-Length: {self._num_bytes}\r\n\r\n"
            self._end.sendall(f"HTTP/1.1 200 OK\r\n{_FACTS}{length}".encode())
        elif method == "POST" and query.startswith("uploads"):
            self._reply(
                "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            )
        elif method == "POST":
            self._keys.add(key)
            self._reply(f"<CompleteMultipartUploadResult><ETag>{_TAG}</ETag></CompleteMultipartUploadResult>")
        elif method == "DELETE":
            self._keys.discard(key)
            self._reply("")
        else:
            if not query:  # otherwise a part of an upload
                self._keys.add(key)
            self._reply("")

    def _reply(self, body: str) -> None:
        self._end.sendall(f"HTTP/1.1 200 OK\r\n{_FACTS}Content-Length: {len(body)}\r\n\r\n{body}".encode())

    def _send_range(self, wanted: str) -> None:
        found = re.match(r"bytes=(\d+)-(\d+)", wanted)
        start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, self._num_bytes)
        part = f"206 Partial Content\r\nContent-Range: bytes {start}-{stop - 1}/{self._num_bytes}"
        status = part if found else "200 OK"
        length = f"Content-Length: {stop - start}\r\n\r\n"
        self._end.sendall(f"HTTP/1.1 {status}\r\n{_FACTS}{length}".encode())
        tile = memoryview(TILE)
        while start < stop:
            at = start % len(tile)
            count = min(len(tile) - at, stop - start)
            self._end.sendall(tile[at : at + count])
            start += count


def main() -> None:
    """Listen until the process is ended."""
    port, num_bytes = map(int, sys.argv[1:])
    keys: set[str] = set()
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    while True:
        end, _ = listener.accept()
        threading.Thread(target=Connection(end, num_bytes, keys).serve, daemon=True).start()


if __name__ == "__main__":
    main()
