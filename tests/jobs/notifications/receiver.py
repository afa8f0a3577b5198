"""HTTP server that records the messages of webhooks, and answers as a test wants."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

SECRET = "T0k3n-5ecret"


class Receiver:
    """Server on this machine, whose URL contains a secret.

    Args:
        certificate: file with a certificate of `localhost` and its key. None: http.

    Attributes:
        bodies: messages so far.
        answers: HTTP statuses of the next responses; 200 when they are used up.
        gate: an event that each response waits for.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.answers: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._scheme = "https"

    @property
    def url(self) -> str:
        """The URL of the webhook."""
        return f"{self._scheme}://localhost:{self._server.server_address[1]}/hooks/{SECRET}?token={SECRET}"

    @property
    def statuses(self) -> list[str]:
        """The statuses of the messages so far."""
        return [body["status"] for body in self.bodies]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            """Handler of one request."""

            def do_POST(self) -> None:
                """Record the message."""
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                receiver.paths.append(self.path)
                receiver.bodies.append(json.loads(body))
                receiver.gate.wait()
                status = receiver.answers.pop(0) if receiver.answers else 200
                with contextlib.suppress(OSError):  # the notifier was killed
                    self.send_response(status)
                    if status in (301, 307):
                        self.send_header("Location", f"{receiver.url}&redirected")
                    self.end_headers()

            @override
            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        return Handler

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Answer requests in the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self.gate.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()
