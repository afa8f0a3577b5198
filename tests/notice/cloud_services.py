"""Metadata services of clouds on 127.0.0.1, which follow each cloud's own protocol."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from urllib.parse import SplitResult, parse_qsl, urlsplit

Headers = dict[str, str]
Answer = tuple[int, str, Headers]  # status, text and further headers


class Service:
    """HTTP server whose subclasses answer the requests. `asked` lists these in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        answer: Callable[..., Answer] = self.answer
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _do(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                service.asked.append((self.command, self.path))
                status, text, extra = answer(self.command, urlsplit(self.path), headers)
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = _do

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, method: str, url: SplitResult, headers: Headers) -> Answer:
        raise NotImplementedError

    def close(self) -> None:
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()


class AwsService(Service):
    """IMDSv2: requires a token, and returns 404 for a document that does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.token = "token-1"
        self.documents: dict[str, str] = {}

    def answer(self, method: str, url: SplitResult, headers: Headers) -> Answer:
        if url.path == "/latest/api/token":
            is_right = method == "PUT" and headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdecimal()
            return (200, self.token, {}) if is_right else (400, "", {})
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, "", {}
        found = self.documents.get(url.path.removeprefix("/latest/meta-data/"))
        return (404, "", {}) if found is None else (200, found, {})


class GcpService(Service):
    """Values with etags. A request may wait until its value has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.num_waiting = 0

    def change(self, name: str, value: str) -> None:
        with self.changed:
            self.values[name] = value
            self.changed.notify_all()

    def answer(self, method: str, url: SplitResult, headers: Headers) -> Answer:
        if headers.get("metadata-flavor") != "Google":
            return 403, "", {}
        name = url.path.removeprefix("/computeMetadata/v1/instance/")
        query = dict(parse_qsl(url.query))
        with self.changed:
            if query.get("wait_for_change") == "true":
                seen = query.get("last_etag")
                self.num_waiting += 1
                self.changed.notify_all()
                self.changed.wait_for(lambda: etag(self.values[name]) != seen, float(query["timeout_sec"]))
                self.num_waiting -= 1
            value = self.values[name]
        return 200, value, {"Metadata-Flavor": "Google", "ETag": etag(value)}


def etag(value: str) -> str:
    return value.encode().hex()[:16]


class AzureService(Service):
    """Document of scheduled events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, object]] = []

    def answer(self, method: str, url: SplitResult, headers: Headers) -> Answer:
        if headers.get("metadata") != "true" or "api-version" not in url.query:
            return 400, "", {}
        if url.path == "/metadata/instance/compute/name":
            return 200, "vm-7", {}
        if url.path == "/metadata/scheduledevents":
            return 200, json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events}), {}
        return 404, "", {}
