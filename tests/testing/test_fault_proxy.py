"""The fault proxy forwards requests unchanged, except those that a fault matches."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fault_proxy import FaultProxy, ProxiedRequest
from holdfast.errors import InvalidInput

BODY = bytes(range(256)) * 1000
Client = http.client.HTTPConnection


class Handler(BaseHTTPRequestHandler):
    """Handler that responds with the body of the request, or with `BODY`, and records requests."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, bytes, dict[str, str]]] = []  # noqa: RUF012 - one server a test, cleared

    def do_GET(self) -> None:
        self.respond(BODY, chunked="chunked" in self.path)

    def do_PUT(self) -> None:
        num_bytes = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(num_bytes)
        if len(body) == num_bytes:  # otherwise the client has closed the connection
            self.respond(body)

    def respond(self, body: bytes, chunked: bool = False) -> None:
        sent = body if self.command == "PUT" else b""
        self.seen.append((self.command, self.path, sent, {k.lower(): v for k, v in self.headers.items()}))
        self.send_response(200)
        framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))
        self.send_header(*framing)
        self.end_headers()
        if chunked:
            half = len(body) // 2
            for part in (body[:half], body[half:], b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


class Server(ThreadingHTTPServer):
    """Server that does not log broken connections, which these tests cause."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error."""


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    Handler.seen.clear()
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with FaultProxy("127.0.0.1", server.server_address[1]) as proxy:
            yield proxy
        server.shutdown()
        thread.join()


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Client]:
    connection = Client("127.0.0.1", proxy.port, timeout=60)
    yield connection
    connection.close()


def fetch(client: Client, method: str, path: str = "/", body: bytes | None = None) -> bytes:
    client.request(method, path, body, {"X-Mark": "here"})
    return client.getresponse().read()


def test_requests_are_forwarded_unchanged(client: Client, proxy: FaultProxy) -> None:
    """One connection carries bodies with a length and in chunks, and the Host header does not change."""
    assert fetch(client, "GET", "/a?b=c") == BODY
    assert fetch(client, "GET", "/chunked") == BODY
    assert fetch(client, "PUT", "/d", BODY) == BODY
    assert [one[:2] for one in Handler.seen] == [("GET", "/a?b=c"), ("GET", "/chunked"), ("PUT", "/d")]
    assert Handler.seen[0][3]["host"] == f"127.0.0.1:{proxy.port}"
    assert proxy.requests("PUT") == [ProxiedRequest("PUT", "/d")]


def test_a_status_code_is_returned_without_the_server(client: Client, proxy: FaultProxy) -> None:
    proxy.inject("503", method="PUT", target="/b")
    client.request("PUT", "/b", BODY)
    response = client.getresponse()
    assert (response.status, b"SlowDown" in response.read()) == (503, True)
    assert Handler.seen == []
    assert fetch(client, "PUT", "/b", b"x") == b"x"  # once, and over the same connection
    assert proxy.requests()[0].fault == "503"


def test_only_matching_requests_fail_from_the_nth_on(client: Client, proxy: FaultProxy) -> None:
    proxy.inject("500", header="X-Mark: here", target="yes", nth=2, times=2)
    statuses = []
    for path in ("/yes", "/no", "/yes", "/yes", "/yes"):
        client.request("GET", path, headers={"X-Mark": "here"})
        response = client.getresponse()
        response.read()
        statuses.append(response.status)
    assert statuses == [200, 200, 500, 500, 200]


@pytest.mark.parametrize(
    ("fault", "num_seen"), [("reset-before", 0), ("reset-request", 0), ("reset-after", 1)]
)
def test_a_reset_breaks_the_connection_before_or_after_the_server_has_the_request(
    client: Client, proxy: FaultProxy, fault: str, num_seen: int
) -> None:
    proxy.inject(fault, after_bytes=1000)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        fetch(client, "PUT", "/a", BODY)
    proxy.close()
    assert len(Handler.seen) == num_seen


@pytest.mark.parametrize("path", ["/a", "/chunked"])
def test_a_truncated_response_ends_early(client: Client, proxy: FaultProxy, path: str) -> None:
    proxy.inject("truncate", after_bytes=70_000)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        fetch(client, "GET", path)


@pytest.mark.parametrize(
    ("fault", "method", "path", "at"),
    [
        ("corrupt", "GET", "/a", 70_000),
        ("corrupt", "GET", "/chunked", 70_000),
        ("corrupt-request", "PUT", "/a", 5),
    ],
)
def test_one_bit_is_flipped(
    client: Client, proxy: FaultProxy, fault: str, method: str, path: str, at: int
) -> None:
    proxy.inject(fault, after_bytes=at)
    found = fetch(client, method, path, BODY if method == "PUT" else None)
    assert [i for i, (a, b) in enumerate(zip(found, BODY, strict=True)) if a != b] == [at]


def test_headers_can_be_removed(client: Client, proxy: FaultProxy) -> None:
    proxy.stripped = frozenset({"x-mark"})
    assert fetch(client, "GET") == BODY
    assert "x-mark" not in Handler.seen[0][3]
    assert "host" in Handler.seen[0][3]


def test_a_held_response_waits_at_its_gate(client: Client, proxy: FaultProxy) -> None:
    gate = proxy.hold(method="PUT")
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(fetch, client, "PUT", "/a", b"x")
        assert gate.reached.wait(600)
        assert len(Handler.seen) == 1
        assert not response.done()
        gate.opened.set()
        assert response.result(600) == b"x"


def test_closing_ends_stalled_connections(client: Client, proxy: FaultProxy) -> None:
    proxy.inject("stall", seconds=600)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(fetch, client, "GET")
        while not proxy.requests():
            threading.Event().wait(0.001)
        proxy.close()
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            response.result(600)


def test_unknown_faults_are_refused(proxy: FaultProxy) -> None:
    for fault in ("flood", "200", "5000"):
        with pytest.raises(InvalidInput, match="Unknown fault"):
            proxy.inject(fault)
