"""Endpoints that a user has named: keys of the user are sent to no other server that a document names."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from holdfast.errors import InvalidInput
from holdfast.store.address import AZURE, GCS, S3, SCHEMES, parse_address

VARIABLE = "HOLDFAST_TRUST_ENDPOINTS"
"""Variable that lists endpoints, such as `https://minio.example.com:9000`, separated by commas."""
NAMED_BY = {
    S3: ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    GCS: ("GOOGLE_BASE_URL",),
    AZURE: ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables by which a user names the endpoint of each protocol."""
_PORTS = {"http": 80, "https": 443}


def check_endpoint(url: str, document: str) -> None:
    """Refuse a URL from a document if keys of the user would go to a server that the user has not named.

    A URL that the user gives in the training script or on the command line is the user's word and needs no
    check. A task file or a marker may be a stranger's.

    Args:
        url: the place that the document names; paths and URLs of clouds themselves are never refused.
        document: its name, for the error.

    Raises:
        InvalidInput: the URL has an `endpoint_url` that no variable of the environment names.
    """
    scheme, mark, _ = url.partition("://")
    if not mark or scheme.lower() not in SCHEMES:
        return
    address = parse_address(url)
    endpoint = address.option("endpoint_url")
    if endpoint is None or address.is_on("anonymous"):
        return
    named = [os.environ.get(name, "") for name in NAMED_BY[address.protocol]]
    named += os.environ.get(VARIABLE, "").split(",")
    if _server(endpoint) in {_server(one.strip()) for one in named if one.strip()}:
        return
    raise InvalidInput(
        f"{document} names the endpoint {endpoint}, to which your keys would be sent. Nothing was sent. If "
        f"this is your server, set {VARIABLE}={endpoint}; if it needs no "
        "keys, write anonymous=yes into the URL.",
        key=endpoint,
    )


def _server(endpoint: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # no number as its port: no server at all
        return endpoint, "", None
