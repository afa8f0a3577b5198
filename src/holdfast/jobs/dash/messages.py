"""Requests of a browser, the keys that they need, and the responses with their common headers; pure."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from base64 import b64encode
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from msgspec import Struct, field

COOKIE = "holdfast-dash"  # name of the cookie that a browser gets for the token
_MAX_FIELDS = 8

Environ = Mapping[str, Any]  # request of a browser, as WSGI servers pass it


def decoded_path(environ: Environ) -> str:
    """Return the path of a request."""
    return environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace")


def parse_query(environ: Environ) -> dict[str, str]:
    """Return the fields in the URL of a request; none if they are too many."""
    fields = environ.get("QUERY_STRING", "")
    try:
        return dict(parse_qsl(fields, keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError:
        return {}


PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Policy of the page: only files of this server, and no code or style inside of elements."""
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Policy of a report, which has its scripts in itself: an origin of its own, without any request."""
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)


class PageResponse(Struct, frozen=True):
    """Response to a browser."""

    status: int
    content: bytes
    kind: str  # media type
    policy: str = PAGE_POLICY
    headers: tuple[tuple[str, str], ...] = ()
    tag: str = ""  # ETag

    def head(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the status with its reason, and all headers."""
        own = [("ETag", self.tag)] if self.tag else []
        if self.status != 304:
            own += [("Content-Type", self.kind), ("Content-Length", str(len(self.content)))]
        headers = [*own, *self.headers, ("Content-Security-Policy", self.policy), *_HEADERS]
        return f"{self.status} {HTTPStatus(self.status).phrase}", headers


def text_response(status: int, text: str) -> PageResponse:
    """Return a response with a line of text."""
    return PageResponse(status, f"{text}\n".encode(), "text/plain; charset=utf-8")


def json_response(value: Any, status: int = 200) -> PageResponse:
    """Return a response with a value and, unless it is an error, the tag of this version."""
    # ASCII: texts may have halves of surrogate pairs, which UTF-8 cannot encode.
    content = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    tag = f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"' if status == 200 else ""
    return PageResponse(status, content, "application/json", tag=tag)


_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
_OWN_PAGE = ("", "none", "same-origin")
_NO_TOKEN = "Open the URL that `holdfast dash` has printed. It ends with a token, which is missing here."
_KEEP_PLACE = "location.replace('./' + location.hash)"  # a refresh would lose what is after # in the URL
_SIGN_IN = (
    f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Holdfast</title>'
    f"<script>{_KEEP_PLACE}</script>"
    '<noscript><meta http-equiv="refresh" content="0;url=./"></noscript>'
    '<p><a href="./">Continue</a></p></html>'
)
_KEEP_DIGEST = hashlib.sha256(_KEEP_PLACE.encode()).digest()
_SIGN_IN_POLICY = (
    f"default-src 'none'; script-src 'sha256-{b64encode(_KEEP_DIGEST).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class AccessKeys(Struct, frozen=True):
    """Random keys of one server: of all paths, the printed URL, and the cookie that replaces its token."""

    # First part of all paths. Browsers send cookies to all ports of a host: this one only for these paths.
    space: str = field(default_factory=lambda: secrets.token_hex(16))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def url(self, port: int) -> str:
        """Return the URL to print."""
        return f"http://127.0.0.1:{port}/{self.space}/?token={self.token}"


def check_access(environ: Environ, keys: AccessKeys) -> PageResponse | None:
    """Return the response to a request without access, or to the token; None if the request is allowed."""
    host, origin, query = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN", ""), parse_query(environ)
    if not _HOST.fullmatch(host):
        # The page of a stranger whose name was pointed at this machine (DNS rebinding).
        return text_response(403, "This server answers to 127.0.0.1 and localhost only.")
    if origin and origin != f"http://{host}":
        return text_response(403, "This server answers to its own page only.")
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        return text_response(405, "This server only shows things, and changes none.")
    space, slash, path = decoded_path(environ).removeprefix("/").partition("/")
    if not slash or not _is_equal(space, keys.space):
        return text_response(403, _NO_TOKEN)
    if not path and "token" in query:
        is_right = _is_equal(query["token"], keys.token)
        return _signed_in(keys) if is_right else text_response(403, _NO_TOKEN)
    cookies = (cookie.strip().partition("=") for cookie in environ.get("HTTP_COOKIE", "").split(";"))
    if not _is_equal(next((value for name, _, value in cookies if name == COOKIE), ""), keys.session):
        return text_response(403, _NO_TOKEN)
    # The relation of the page that asks to this server, by the browser itself.
    if environ.get("HTTP_SEC_FETCH_SITE", "") not in _OWN_PAGE:
        return text_response(403, "This server answers to its own page only.")
    return None


def _is_equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _signed_in(keys: AccessKeys) -> PageResponse:
    """Return the page that replaces the token by a cookie: browsers keep no strict cookie from a redirect."""
    cookie = f"{COOKIE}={keys.session}; Path=/{keys.space}/; HttpOnly; SameSite=Strict"
    content, headers = _SIGN_IN.encode(), (("Set-Cookie", cookie),)
    return PageResponse(200, content, "text/html; charset=utf-8", policy=_SIGN_IN_POLICY, headers=headers)
