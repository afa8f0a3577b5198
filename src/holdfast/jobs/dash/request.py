"""Request of a browser: the parts that the dash looks at, parsed; pure."""

from __future__ import annotations

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
