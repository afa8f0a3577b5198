"""Codes of S3, Google Cloud Storage and Azure, each sent by a real server: class, advice and tries."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.error_codes import BY_CODE, ErrorKind
from holdfast.errors import Conflict, Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported

pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")

# The status that a kind of errors usually comes with, and the class that a read then raises.
_EXPECTED: dict[ErrorKind, tuple[int, type[HoldfastError]]] = {
    ErrorKind.ABSENT: (404, NotFound),
    ErrorKind.NO_BUCKET: (404, NotFound),
    ErrorKind.TAKEN: (412, RetryLater),  # a read, which nothing can be in the way of
    ErrorKind.PAST_END: (416, RetryLater),
    ErrorKind.DENIED: (403, Denied),
    ErrorKind.CLOCK: (403, Denied),
    ErrorKind.MISCONFIGURED: (400, Denied),
    ErrorKind.FULL: (507, Denied),
    ErrorKind.PASSING: (503, RetryLater),
    ErrorKind.NAME: (400, InvalidInput),
    ErrorKind.NOT_OFFERED: (501, Unsupported),
}
ALL_STATUSES = (400, 403, 409, 500)
"""Statuses that one code may come with on different stores: the code decides."""


class Refusing:
    """Server that answers each request in the same way, and counts the requests."""

    def __init__(self) -> None:
        self.status, self.body = 400, b""
        self.headers: dict[str, str] = {}
        self.methods: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet for head and body

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.methods.append(self.command)
                self.send_response(outer.status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(outer.body)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"

    def refuse(self, status: int, code: str = "", message: str = "m", further: str = "") -> None:
        """Answer with a code from now on."""
        text = f"<Error><Code>{code}</Code><Message>{message}</Message>{further}</Error>"
        self.status, self.headers = status, {"Content-Type": "application/xml"}
        self.body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode() if code else b""
        self.methods.clear()


@pytest.fixture(scope="module")
def server() -> Iterator[Refusing]:
    found = Refusing()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture
def stores(server: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Store]:
    """Return a store of each protocol at the server, which tries for a moment only."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    account = {"gcs_base_url": f"http://{server.address}", "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    (tmp_path / "google.json").write_text(json.dumps(account))
    for name, value in {
        "HOME": str(tmp_path),
        "AWS_ACCESS_KEY_ID": "KEY",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
        "GOOGLE_SERVICE_ACCOUNT": str(tmp_path / "google.json"),
        "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
    }.items():
        monkeypatch.setenv(name, value)
    end = f"endpoint_url=http://{server.address}&timeout=1ms"
    return {
        "s3": open_store(f"s3://bucket/run?{end}"),
        "gcs": open_store(f"gs://bucket/run?{end}"),
        "azure": open_store(f"az://bucket/run?{end}&account=name"),
    }


def error_of(store: Store, name: str = "a") -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        store.get(name)
    return caught.value


def test_the_code_decides_and_each_has_a_class_and_advice(server: Refusing, stores: dict[str, Store]) -> None:
    for code, (kind, advice) in BY_CODE.items():
        status, expected = _EXPECTED[kind]
        for place, store in stores.items():
            server.refuse(status, code)
            error = error_of(store)
            assert type(error) is expected, (code, place, error)
            if kind not in (ErrorKind.ABSENT, ErrorKind.NO_BUCKET):
                assert code in str(error), (code, place)
            if kind in (ErrorKind.DENIED, ErrorKind.CLOCK, ErrorKind.MISCONFIGURED, ErrorKind.FULL):
                assert advice.partition(".")[0] in str(error) or "region" in str(error), (code, place, error)
                assert len(server.methods) == 1 + (kind is ErrorKind.DENIED), (code, place, "tries")


@pytest.mark.parametrize("status", ALL_STATUSES)
def test_a_known_code_outweighs_the_status(server: Refusing, stores: dict[str, Store], status: int) -> None:
    for kind in (ErrorKind.CLOCK, ErrorKind.FULL, ErrorKind.MISCONFIGURED, ErrorKind.DENIED):
        code = next(code for code, (one, _) in BY_CODE.items() if one is kind)
        server.refuse(status, code)
        assert type(error_of(stores["s3"])) is Denied, (code, status)


def test_a_clock_that_is_off_is_no_matter_of_credentials(server: Refusing, stores: dict[str, Store]) -> None:
    time = "<ServerTime>2026-01-02T03:04:05Z</ServerTime>"
    server.refuse(403, "RequestTimeTooSkewed", "The difference is too large.", time)
    said = str(error_of(stores["s3"]))
    assert "the time of the store is 2026-01-02T03:04:05Z" in said
    assert "The clock of this machine is wrong" in said
    assert "renew" not in said
    server.refuse(403, "AuthenticationFailed", "Request date header too old: 'Thu, 01 Jan 2026'")
    assert "The clock of this machine is wrong" in str(error_of(stores["azure"]))


def test_the_region_that_the_store_names_is_shown(server: Refusing, stores: dict[str, Store]) -> None:
    message = "The authorization header is wrong; the region 'us-east-1' is wrong; expecting 'eu-central-1'"
    server.refuse(400, "AuthorizationHeaderMalformed", message, "<Region>eu-central-1</Region>")
    for act in (lambda: stores["s3"].get("a"), lambda: stores["s3"].size("a")):  # HEAD has no body
        with pytest.raises(Denied, match=r"in region eu-central-1, and .* us-east-1.*`region=eu-central-1`"):
            act()
    server.refuse(301, "PermanentRedirect")
    server.headers["x-amz-bucket-region"] = "ap-south-1"
    for act in (lambda: stores["s3"].get("a"), lambda: list(stores["s3"].list())):
        with pytest.raises(Denied, match=r"in region ap-south-1, and .*`region=ap-south-1`"):
            act()
    server.refuse(301, "PermanentRedirect")
    assert "This request was for us-east-1" in str(error_of(stores["s3"])), "it names none"


def test_a_refused_head_is_explained_by_a_get(server: Refusing, stores: dict[str, Store]) -> None:
    server.refuse(400, "ExpiredToken")
    with pytest.raises(Denied, match=r"ExpiredToken.*renew"):
        stores["s3"].size("a")
    server.refuse(403, "RequestTimeTooSkewed")
    with pytest.raises(Denied, match="The clock of this machine is wrong"):
        stores["azure"].size("a")


def test_an_object_kept_by_a_policy_is_not_another_writer(server: Refusing, stores: dict[str, Store]) -> None:
    server.refuse(409, "BlobImmutableDueToPolicy")
    with pytest.raises(Denied, match="retention policy"):
        stores["azure"].put("a", b"x", if_absent=True)
    server.refuse(412, "PreconditionFailed")
    with pytest.raises((Conflict, RetryLater)):
        stores["s3"].put("a", b"x", if_absent=True)


def test_https_and_http_mixed_up_is_not_retried(server: Refusing, stores: dict[str, Store]) -> None:
    plain = open_store(f"s3://bucket/run?endpoint_url=https://{server.address}&timeout=60")
    assert "does not speak TLS at this port: write `http://`" in str(error_of(plain))
    server.refuse(400)
    server.body = b"Client sent an HTTP request to an HTTPS server.\n"
    assert "expects https: write `https://`" in str(error_of(stores["s3"]))
    assert isinstance(error_of(stores["s3"]), Denied)


def test_the_cause_of_a_failed_connection_is_shown(stores: dict[str, Store]) -> None:
    away = open_store("s3://bucket/run?endpoint_url=http://127.0.0.1:1&timeout=1ms")
    error = error_of(away)
    assert type(error) is RetryLater
    assert "Connection refused" in str(error)
