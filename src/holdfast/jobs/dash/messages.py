"""Requests of a browser, and the responses of the dash with the headers that all of them have; pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

COOKIE = "holdfast-dash"
"""Name of the cookie that a browser gets for the token."""
_MAX_FIELDS = 8


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Request of a browser. Headers that were not sent are empty."""

    method: str
    path: str  # decoded
    query: Mapping[str, str]
    host: str = ""
    origin: str = ""
    fetch_site: str = ""  # relation of the page that asks to this server, by the browser itself
    session: str = ""  # value of the cookie
    known_tag: str = ""  # ETag of the version that the browser has


def parse_request(environ: Mapping[str, Any]) -> PageRequest:
    """Return the request in a WSGI environment."""
    fields = environ.get("QUERY_STRING", "")
    try:
        query = dict(parse_qsl(fields, keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError:  # too many
        query = {}
    return PageRequest(
        method=environ["REQUEST_METHOD"],
        path=environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace"),
        query=query,
        host=environ.get("HTTP_HOST", ""),
        origin=environ.get("HTTP_ORIGIN", ""),
        fetch_site=environ.get("HTTP_SEC_FETCH_SITE", ""),
        session=_cookie(environ.get("HTTP_COOKIE", "")),
        known_tag=environ.get("HTTP_IF_NONE_MATCH", ""),
    )


def _cookie(header: str) -> str:
    for one in header.split(";"):
        name, _, value = one.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


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
_REASONS = {
    200: "OK",
    304: "Not Modified",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class PageResponse:
    """Response to a browser."""

    status: int
    content: bytes
    kind: str  # media type
    policy: str = PAGE_POLICY
    headers: tuple[tuple[str, str], ...] = ()
    tag: str = ""  # ETag

    @property
    def status_line(self) -> str:
        """Status with its reason."""
        return f"{self.status} {_REASONS[self.status]}"

    def all_headers(self) -> list[tuple[str, str]]:
        """Return all headers."""
        own = [("ETag", self.tag)] if self.tag else []
        if self.status != 304:
            own += [("Content-Type", self.kind), ("Content-Length", str(len(self.content)))]
        return [*own, *self.headers, ("Content-Security-Policy", self.policy), *_HEADERS]


def text_response(status: int, text: str) -> PageResponse:
    """Return a response with a line of text."""
    return PageResponse(status, f"{text}\n".encode(), "text/plain; charset=utf-8")


def error_response(status: int, message: str) -> PageResponse:
    """Return a response with a message for the page."""
    return PageResponse(status, _encoded({"error": message}), "application/json")


def json_response(value: Any, *, known_tag: str) -> PageResponse:
    """Return a response with a value. It is empty if the browser has the same version."""
    content = _encoded(value)
    tag = f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"'
    if tag == known_tag:
        return PageResponse(304, b"", "", tag=tag)
    return PageResponse(200, content, "application/json", tag=tag)


def _encoded(value: Any) -> bytes:
    # ASCII: texts may have halves of surrogate pairs, which UTF-8 cannot encode.
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
