"""Asks a cloud's metadata service: one small HTTP request to an address on this machine's own link."""

from __future__ import annotations

import http.client
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

_MAX_BYTES = 1 << 20


class Unreachable(Exception):
    """The service did not answer, or not as it should; it may later. Stays within this room."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service said."""

    status: int
    text: str
    headers: Mapping[str, str]  # names in lower case


def ask(
    base: str, path: str, *, headers: Mapping[str, str], method: str = "GET", timeout_s: float = 2.0
) -> Answer:
    """One request. No proxy is used, no redirect followed, at most 1 MiB is read.

    Args:
        base: `http://host[:port]`.
        path: with its query.
        headers: of the request.
        method: GET or PUT.
        timeout_s: for connecting, and for each wait for bytes.

    Raises:
        Unreachable: no answer, or one that is no HTTP.
    """
    place = urllib.parse.urlsplit(base)
    connection = http.client.HTTPConnection(place.hostname or "", place.port or 80, timeout=timeout_s)
    try:
        connection.request(method, place.path.rstrip("/") + path, headers=dict(headers))
        response = connection.getresponse()
        text = response.read(_MAX_BYTES).decode("utf-8", "replace")
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, text, found)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{base}{path}: {error!r}") from error
    finally:
        connection.close()
