"""`holdfast dash` as a process: its address, its URL, its end, and the browser that it opens."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import stat
import sys
import webbrowser
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dash.serving import serving
from holdfast.cli import main
from holdfast.jobs.dash import application

pytest.importorskip("waitress", reason="needs the extra `dash`")


def fetch(url: str, cookie: str = "", **headers: str) -> tuple[int, Message, bytes]:
    """Request a URL without a proxy."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    connection.request("GET", path, headers={"Cookie": cookie, **headers})
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def test_the_url_opens_the_page_until_ctrl_c(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, process):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[0-9a-f]{32}/\?token=[\w-]{43}", url)
        base = url.partition("?")[0]
        assert fetch(base)[0] == 403
        status, headers, _ = fetch(url)
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert (status, "Server" in headers) == (200, False)
        status, headers, page = fetch(base, cookie)
        assert status == 200
        assert b"<title>Jobs - Holdfast</title>" in page
        status, headers, content = fetch(f"{base}api/jobs", cookie)
        assert (status, content[:10]) == (200, b'{"jobs":[]')
        assert fetch(f"{base}api/jobs", cookie, **{"If-None-Match": headers["ETag"]})[0] == 304
        assert fetch(f"{base}%2e%2e/%2e%2e/etc/passwd", cookie)[0] == 404
        assert fetch(f"{base}..%2f..%2fetc%2fpasswd", cookie)[0] == 404
        assert fetch(base, cookie, Host="evil.example")[0] == 403
        port = urlsplit(url).port or 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert (process.returncode, out) == (0, "")
        assert err == "Ctrl-C ends it. The URL is a key to your jobs: do not pass it on.\n"


def test_a_port_that_is_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dash", "--port", str(port)]) == 2
    assert f"Port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert main(["dash", "--port", "70000"]) == 2
    assert "Port 70000 of 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_an_invalid_home_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dash", "ftp://host/run"]) == 2
    assert "unknown scheme" in capsys.readouterr().err


def test_the_extra_is_named_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "waitress.server", None)
    assert main(["dash"]) == 2
    assert "pip install 'torch-holdfast[dash]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        *(({}, False), ({"DISPLAY": ""}, False), ({"DISPLAY": ":0"}, True)),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"}, False),
    ],
)
def test_a_browser_is_opened_on_a_desktop_only(env: dict[str, str], shown: bool) -> None:
    assert application.has_desktop(env) is shown


def test_the_token_is_not_among_the_arguments_of_the_browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """All users of a machine see the arguments of all processes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "files"))
    (tmp_path / "files").mkdir()
    seen: list[str] = []
    monkeypatch.setattr(webbrowser, "open", seen.append)
    with application.opened("http://127.0.0.1:1/x/?token=the-token"):
        (url,) = seen
        assert "the-token" not in url
        (folder,) = (tmp_path / "files").iterdir()
        (file,) = folder.iterdir()
        assert url == file.as_uri()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert "url=http://127.0.0.1:1/x/?token=the-token" in file.read_text()
    assert not folder.exists()
