"""The dash answers its own page in the browser of its own user, and refuses everything else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dash.client import PORT, Client
from holdfast.jobs.dash.messages import COOKIE, AccessKeys

Connect = Callable[..., Client]
REFUSED = "It ends with a token, which is missing here."


def test_the_token_is_exchanged_for_a_cookie_of_this_server(client: Client) -> None:
    url = client.keys.url(PORT)
    assert url == f"http://127.0.0.1:{PORT}/{client.keys.space}/?token={client.keys.token}"
    answer = client.get_raw(f"/{client.keys.space}/", QUERY_STRING=f"token={client.keys.token}")
    assert answer.status == 200
    place = f"Path=/{client.keys.space}/; HttpOnly; SameSite=Strict"
    assert answer.headers["Set-Cookie"] == f"{COOKIE}={client.keys.session}; {place}"
    assert 'http-equiv="refresh" content="0;url=./"' in answer.text
    assert client.keys.token not in answer.text
    script = answer.text.partition("<script>")[2].partition("</script>")[0]
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{hashed}'; "), "only this script runs"
    assert answer.headers["Referrer-Policy"] == "no-referrer", "the URL has the token"


def test_every_key_is_random_and_long() -> None:
    first, second = AccessKeys(), AccessKeys()
    keys = [first.space, first.token, first.session, second.space, second.token, second.session]
    assert len(set(keys)) == 6
    assert all(len(key) >= 32 for key in keys)


@pytest.mark.parametrize("query", ["token=", "token=wrong", "token", "token=%ff", "token=a&token=b"])
def test_a_wrong_token_is_refused(client: Client, query: str) -> None:
    answer = client.get_raw(f"/{client.keys.space}/", QUERY_STRING=query)
    assert (answer.status, "Set-Cookie" in answer.headers) == (403, False)
    assert REFUSED in answer.text


@pytest.mark.parametrize(
    "path", ["", "page.css", "main.js", "charts.js", "api/jobs", "api/jobs/1", "api/jobs/1/output", "nothing"]
)
def test_without_the_cookie_or_the_space_nothing_is_shown(client: Client, path: str) -> None:
    for cookie in (None, f"{COOKIE}=", f"{COOKIE}=x", f"{COOKIE}={client.keys.token}", "a=b", ";;="):
        answer = client.get(path, HTTP_COOKIE=cookie)
        assert (answer.status, REFUSED in answer.text) == (403, True), cookie
    own = f"{COOKIE}={client.keys.session}"
    for place in (f"/{path}", f"/{'0' * 32}/{path}", f"//{client.keys.space}/{path}", ""):
        answer = client.get_raw(place, HTTP_COOKIE=own)
        assert (answer.status, REFUSED in answer.text) == (403, True), place


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LOCALHOST:65000", "[::1]:8321"])
def test_a_forwarded_port_has_another_number(client: Client, host: str) -> None:
    assert client.get(HTTP_HOST=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "evil.example", f"evil.example:{PORT}", "127.0.0.1.evil.example"),
        *("localhost.evil.example:80", "127.0.0.1:80@evil.example", "127.0.0.1:", "127.0.0.1:x"),
        *("127.0.0.1:80\n", "127.0.0.2", "0.0.0.0"),
    ],
)
def test_a_name_that_points_here_is_refused(client: Client, host: str | None) -> None:
    """A page of a stranger may give its own name this address (DNS rebinding)."""
    with_token = f"token={client.keys.token}"
    assert client.get(HTTP_HOST=host).status == 403
    assert client.get_raw(f"/{client.keys.space}/", HTTP_HOST=host, QUERY_STRING=with_token).status == 403


METHODS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
ORIGINS = ("null", "http://evil.example", "http://127.0.0.1:1", f"https://127.0.0.1:{PORT}")


@pytest.mark.parametrize(
    ("status", "changed"),
    [
        *((405, {"REQUEST_METHOD": one}) for one in METHODS),  # it would change something
        # A page of another user's server on this machine is of the same site, since ports do not count.
        *((403, {"HTTP_ORIGIN": one}) for one in ORIGINS),
        *((403, {"HTTP_SEC_FETCH_SITE": one}) for one in ("cross-site", "same-site")),
        (200, {"HTTP_ORIGIN": f"http://127.0.0.1:{PORT}"}),
        *((200, {"HTTP_SEC_FETCH_SITE": one}) for one in ("same-origin", "none")),
    ],
)
def test_only_the_own_page_may_ask_and_only_to_see(
    client: Client, status: int, changed: dict[str, str]
) -> None:
    for path in ("", "api/jobs"):
        assert client.get(path, **changed).status == status
    assert client.get("api/jobs/1", **changed).status == (404 if status == 200 else status)


def test_the_url_may_be_a_link_in_another_page(client: Client) -> None:
    token = f"token={client.keys.token}"
    link = client.get_raw(f"/{client.keys.space}/", QUERY_STRING=token, HTTP_SEC_FETCH_SITE="cross-site")
    assert link.status == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("", 200), ("main.js", 200), ("api/jobs", 200), ("nothing", 404), ("api/jobs/7", 404)],
)
def test_every_response_has_the_headers_of_a_strict_page(client: Client, path: str, status: int) -> None:
    for answer in (client.get(path), client.get(path, HTTP_COOKIE=None)):
        assert answer.status in (status, 403)
        policy = answer.headers["Content-Security-Policy"]
        for rule in ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
            assert rule in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in answer.headers


TRAVERSALS = [
    *("../secret", "../../etc/passwd", "..%2fsecret", "/etc/passwd", "assets/page.css", "./page.css"),
    *("page.css/", "page.css\0", "Page.css", "\\..\\secret", "__init__.py", "application.py"),
    *(f"api/jobs/{one}" for one in ("../../secret", "0x1", "-1", "1 ", "1\n", "٣", "99999999999999999999")),
    *("api/jobs/1/homes/../../../../etc/passwd/curves", "api/homes//etc/curves"),
    *(f"api/homes/0000000000000000/{one}" for one in ("curves", "report")),
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_nothing_but_the_listed_files_and_jobs_is_served(connect: Connect, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("the secret")
    client = connect(str(tmp_path / "run"))
    for one in (path, path.replace("/", "%2f")):
        answer = client.get(one.encode().decode("latin-1"))
        assert answer.status == 404
        assert "secret" not in answer.text.replace("no such secret", "")
        assert "root:" not in answer.text


def test_the_page_refers_to_its_own_files_only(client: Client) -> None:
    page = client.get().text
    names = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {"page.css", "main.js", "icon.svg"} == set(names)
    seen: set[str] = set()
    while names:
        name = names.pop()
        seen.add(name)
        answer = client.get(name)
        assert answer.status == 200, name
        if name.endswith(".js"):
            names += [one for one in re.findall(r'from "\./([^"]+)"', answer.text) if one not in seen]
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), name
        assert "innerHTML" not in answer.text
        assert "outerHTML" not in answer.text
        assert "insertAdjacent" not in answer.text
    assert len(seen) > 10


def test_the_head_of_a_response_has_no_content(client: Client) -> None:
    answer = client.get("main.js", REQUEST_METHOD="HEAD")
    assert (answer.status, answer.content) == (200, b"")
