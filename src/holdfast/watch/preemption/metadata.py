"""Requests to a cloud's metadata service, which answers on this machine's own link."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

_MAX_BYTES = 1 << 20


class Unreachable(Exception):
    """Failure of the service to answer correctly, which may pass. Not raised outside of this folder."""


@dataclass(frozen=True, slots=True)
class Response:
    """Response of a metadata service."""

    status: int
    text: str
    headers: Mapping[str, str]  # names in lower case


def request(
    base: str, path: str, *, headers: Mapping[str, str], method: str = "GET", timeout_s: float = 2.0
) -> Response:
    """Send a request and return the response. Ignores proxies and redirects, and reads at most 1 MiB.

    Args:
        base: `http://host[:port]`.
        timeout_s: limit for connecting, and for each wait for bytes.

    Raises:
        Unreachable: the service did not answer, or not in HTTP.
    """
    # Here, because it also imports TLS, and most runs never send a request.
    import http.client

    url = urllib.parse.urlsplit(base)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=timeout_s)
    try:
        connection.request(method, url.path.rstrip("/") + path, headers=dict(headers))
        response = connection.getresponse()
        text = response.read(_MAX_BYTES).decode("utf-8", "replace")
        return Response(response.status, text, {name.lower(): value for name, value in response.getheaders()})
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{base}{path}: {error!r}") from error
    finally:
        connection.close()
