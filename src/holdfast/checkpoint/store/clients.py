"""Clients of object stores, made from an address and the environment, once per process."""

from __future__ import annotations

import http.client
import importlib
import os
import threading
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

from holdfast.checkpoint.store.address import AZURE, S3, Address
from holdfast.checkpoint.store.command_limit import command_limit
from holdfast.checkpoint.store.endpoints import (
    ACCOUNT_NAMED_BY,
    NAMED_BY,
    first_set,
    parse_connection_string,
    shared_credentials,
    shared_region,
)
from holdfast.errors import InvalidInput, Unsupported

_CONNECT_TIMEOUT_S = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_MANY_TRIES = 10_000  # the time limit ends them

_used_by: int | None = None  # process that has used the client library; a fork does not copy its threads


def load_library() -> Any:
    """Return the module `obstore`."""
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise Unsupported(
            "Object stores need the package obstore (Python 3.11 or newer), which is not installed: "
            "pip install 'torch-holdfast[remote]'."
        ) from None


def check_process(place: str) -> None:
    """Raise in a process that was forked after its parent used an object store."""
    if _used_by not in (None, os.getpid()):
        raise Unsupported(
            f"{place} cannot be used in this process: it was forked after its parent used an object store. "
            "The client's threads do not survive a fork, so the call would hang. Nothing was done. Start "
            "the process with 'spawn' or 'forkserver' (DataLoader: multiprocessing_context='spawn'), or "
            "use the store only in the parent."
        )


class Clients:
    """Clients for one address: one leaves retries to the caller, the other retries by itself.

    Clients are made at the first use, so that a process may fork before that.
    """

    def __init__(self, address: Address) -> None:
        load_library()
        base = importlib.import_module("obstore.exceptions").BaseError
        self.client_errors: tuple[type[Exception], ...] = (base, ValueError, OSError)
        """What calls of the library raise when the store, or the way to it, refuses."""
        self._address = address
        self._lock = threading.Lock()
        self._made: dict[bool, Any] = {}

    def get(self, *, retrying: bool = False) -> Any:
        """Return a client; a `retrying` one repeats each request until the address's time limit."""
        global _used_by
        check_process(self._address.place)
        _used_by = os.getpid()
        with self._lock:
            if retrying not in self._made:
                self._made[retrying] = _make_client(self._address, retrying=retrying)
            return self._made[retrying]

    def drop(self) -> None:
        """Discard the clients; the next use reads credentials and settings again."""
        with self._lock:
            self._made.clear()


def _make_client(address: Address, *, retrying: bool) -> Any:
    stores = importlib.import_module("obstore.store")
    endpoint = address.option("endpoint_url") or first_set(NAMED_BY[address.protocol])
    settings: dict[str, Any] = {"skip_signature": True} if address.is_on("anonymous") else {}
    if address.protocol == S3:
        make, own = stores.S3Store, _s3_settings(address, endpoint)
    elif address.protocol == AZURE:
        make, own = stores.AzureStore, _azure_settings(address, endpoint)
    else:
        make, own = stores.GCSStore, {"base_url": endpoint.rstrip("/")} if endpoint else {}
    settings.update(own)
    endpoint = settings.get("endpoint") or endpoint
    timeout_s = address.request_timeout_s
    if not retrying and command_limit.limit_s is not None:  # retrying clients send large parts, for long
        timeout_s = max(min(timeout_s, command_limit.limit_s), 1.0)
    try:
        return make(
            address.bucket,
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
                "timeout": timedelta(seconds=timeout_s),
            },
            retry_config=_retries(address, retrying=retrying),
            **settings,
        )
    except (importlib.import_module("obstore.exceptions").BaseError, ValueError) as error:
        reason = " ".join(str(error).partition("Debug source:")[0].split())
        raise InvalidInput(f"Could not make a client for {address.place}: {reason}") from None


def _retries(address: Address, *, retrying: bool) -> dict[str, Any]:
    first, longest = timedelta(seconds=_FIRST_PAUSE_S), timedelta(seconds=_LONGEST_PAUSE_S)
    limit_s = min(address.timeout_s, command_limit.limit_s or address.timeout_s)
    return {
        "max_retries": _MANY_TRIES if retrying else 0,
        "retry_timeout": timedelta(seconds=limit_s),
        "backoff": {"init_backoff": first, "max_backoff": longest, "base": 2},
    }


def _s3_settings(address: Address, endpoint: str | None) -> dict[str, Any]:
    profile = address.option("profile")
    settings: dict[str, Any] = {
        "disable_bulk_delete": True,  # not needed for single deletes, and some servers lack it
        "virtual_hosted_style_request": address.is_on("virtual_hosted"),
        **_integrity_settings(address, endpoint),
    }
    if endpoint:
        settings["endpoint"] = endpoint.rstrip("/")
    if region := region_of(address):
        settings["region"] = region
    if sse := address.option("sse"):
        settings["server_side_encryption"] = sse
    if key_id := address.option("sse_kms_key_id"):
        settings["sse_kms_key_id"] = key_id
    if address.is_on("requester_pays"):
        settings["request_payer"] = True
    if not address.is_on("anonymous") and (provider := shared_credentials(profile)):
        settings["credential_provider"] = provider
    return settings


def region_of(address: Address) -> str | None:
    """Return the region that an address or the environment names for S3."""
    known = first_set(("AWS_REGION", "AWS_DEFAULT_REGION"))
    return address.option("region") or known or shared_region(address.option("profile"))


def ask_region(url: str) -> str:
    """Return the region that the store names in an answer to a request without keys; "" if it does not.

    Blocks: at most a few seconds.
    """
    request = urllib.request.Request(url.partition("?")[0], method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_CONNECT_TIMEOUT_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    region = headers.get("x-amz-bucket-region") or ""
    return region if region.replace("-", "").isalnum() else ""


def _integrity_settings(address: Address, endpoint: str | None) -> dict[str, Any]:
    """Return the settings that let the server verify a body."""
    # Over http the signature must cover the body: it is the only check that every server makes. Its SHA-256
    # is also sent as a checksum. Over https the connection protects the body, so a CRC, which takes a quarter
    # of the time, is enough.
    is_plain = bool(endpoint and endpoint.startswith("http://"))
    checksum = address.option("checksum") or ("sha256" if is_plain else "crc64nvme")
    settings: dict[str, Any] = {"unsigned_payload": not is_plain}
    return settings if checksum == "none" else {**settings, "checksum_algorithm": checksum}


def _azure_settings(address: Address, endpoint: str | None) -> dict[str, Any]:
    settings = parse_connection_string(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    if endpoint:
        settings["endpoint"] = endpoint.rstrip("/")
    if account := address.option("account") or first_set(ACCOUNT_NAMED_BY):
        settings["account_name"] = account
    if "account_name" not in settings:
        raise InvalidInput(
            f"{address.place} does not name a storage account. Set AZURE_STORAGE_ACCOUNT_NAME, "
            "or append ?account=NAME to the URL."
        )
    return settings
