"""Clients of object stores: made from an address and the environment; failures that may pass are retried."""

from __future__ import annotations

import http.client
import importlib
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from msgspec import Struct, field

from holdfast.checkpoint.store.address import AZURE, GCS, S3, Address
from holdfast.checkpoint.store.client_errors import ClientError, classify
from holdfast.checkpoint.store.command_limit import command_limit
from holdfast.checkpoint.store.endpoints import connection_settings, setting, shared_credentials
from holdfast.checkpoint.store.error_codes import REGION, ErrorKind
from holdfast.errors import Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.system import backoff
from holdfast.system.units import format_duration, plural

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


_T = TypeVar("_T")


class TryAgain(Exception):
    """Request for another try, raised from the client's error."""


class StoreRequest(Struct):
    """One request to a store.

    `verb` - the action, for messages. `name` - the object, or a prefix. `num_bytes` - size of its data.
    `limit_s` - time limit of its retries, or None for the address's.
    """

    verb: str
    name: str
    num_bytes: int | None = None
    limit_s: float | None = None
    num_tries: int = 0
    began_s: float = field(default_factory=time.monotonic)


class Clients:
    """Clients of one address, and requests to it: one leaves retries to `call`, the other retries by itself.

    Clients are made at the first use, so that a process may fork before that. Credentials that the store
    refuses are read again once.
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

    def call(
        self,
        request: StoreRequest,
        act: Callable[[Any], _T],
        *,
        retrying: bool = False,
        past_end: _T | None = None,
    ) -> _T:
        """Return the result of `act`, repeated while failures may pass and the time limit allows.

        If `retrying`, its client retries by itself. `past_end` is the result if the object ends too early.
        """
        is_renewed = False
        with command_limit.reporting(self._address.place):
            while True:
                request.num_tries += 1
                client = self.get(retrying=retrying)
                try:
                    return act(client)
                except HoldfastError:
                    raise
                except TryAgain as error:
                    client_error = ClientError(ErrorKind.PASSING, str(error))
                except self.client_errors as error:
                    client_error = classify(error)
                if client_error.kind is ErrorKind.PAST_END and past_end is not None:
                    return past_end
                if client_error.kind is ErrorKind.DENIED and not is_renewed:
                    is_renewed = True  # keys may have been renewed since the client read them
                    self.drop()
                    continue
                doubled_s = backoff.doubled(request.num_tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                pause_s = backoff.jittered(doubled_s)
                is_over = time.monotonic() + pause_s > request.began_s + self._limit_s(request)
                if client_error.kind is not ErrorKind.PASSING or is_over:
                    raise self.failure(request, client_error) from None  # its text may hold secrets
                time.sleep(pause_s)

    def failure(self, request: StoreRequest, client_error: ClientError) -> HoldfastError:
        """Return the error to raise for a client error."""
        name, verb, kind = request.name, request.verb, client_error.kind
        if kind is ErrorKind.ABSENT and verb != "write":
            return not_found(self._address, name)
        bytes_of = "" if request.num_bytes is None else f" ({request.num_bytes} bytes)"
        failed = f"Could not {verb} {self._address.place}/{name}{bytes_of}: {client_error.reason}."
        if kind in (ErrorKind.NO_BUCKET, ErrorKind.ABSENT):  # a write can only miss its bucket
            advice = (
                f"The bucket {self._address.bucket!r} does not exist. Create it, or correct URL or endpoint."
            )
            return (RetryLater if verb == "write" else NotFound)(f"{failed} {advice}", key=name)
        if kind is ErrorKind.NAME:
            return InvalidInput(f"{failed} Objects cannot have this name.", key=name)
        if kind is ErrorKind.NOT_OFFERED:
            return Unsupported(f"{failed} This server does not support it.", key=name)
        if kind in (ErrorKind.DENIED, ErrorKind.CLOCK, ErrorKind.MISCONFIGURED, ErrorKind.FULL):
            advice = client_error.advice
            if advice is REGION and self._address.protocol == S3:
                advice = self._right_region(client_error)
            return Denied(f"{failed} {advice}", key=name)
        tried = f"Given up after {format_duration(time.monotonic() - request.began_s)}"
        tries, limit_s = plural(request.num_tries, "try", "tries"), self._limit_s(request)
        limit = f" and {tries} (limit {format_duration(limit_s)})"
        return RetryLater(f"{failed} {tried}{limit if kind is ErrorKind.PASSING else ''}.", key=name)

    def _right_region(self, client_error: ClientError) -> str:
        """Return the region that the store names, and how to use it."""
        used = setting(self._address, "region") or "us-east-1, the default"
        region = client_error.region or (_ask_region(client_error.url) if client_error.url else "")
        if not region:
            return f"{REGION} This request was for {used}: set `region=` in the URL, or correct its endpoint."
        return (
            f"The bucket is in region {region}, and this request was for {used}. Append `region={region}` "
            f"to the options of the URL, or set AWS_REGION={region}."
        )

    def _limit_s(self, request: StoreRequest) -> float:
        limit_s = self._address.timeout_s if request.limit_s is None else request.limit_s
        if command_limit.limit_s is None or self._address.option("timeout") is not None:
            return limit_s
        return min(limit_s, command_limit.limit_s)


def not_found(address: Address, name: str) -> NotFound:
    """Return the error for an object that does not exist."""
    return NotFound(f"{address.place}/{name} does not exist.", key=name)


def _make_client(address: Address, *, retrying: bool) -> Any:
    stores = importlib.import_module("obstore.store")
    endpoint = (setting(address, "endpoint_url") or "").rstrip("/")
    make, settings = {
        S3: (stores.S3Store, _s3_settings),
        AZURE: (stores.AzureStore, _azure_settings),
        GCS: (stores.GCSStore, lambda _, endpoint: {"base_url": endpoint} if endpoint else {}),
    }[address.protocol]
    own = settings(address, endpoint)
    timeout_s = address.request_timeout_s
    if not retrying and command_limit.limit_s is not None:  # retrying clients send large parts, for long
        timeout_s = max(min(timeout_s, command_limit.limit_s), 1.0)
    try:
        return make(
            address.bucket,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
                "timeout": timedelta(seconds=timeout_s),
            },
            retry_config={
                "max_retries": _MANY_TRIES if retrying else 0,
                "retry_timeout": timedelta(
                    seconds=min(address.timeout_s, command_limit.limit_s or address.timeout_s)
                ),
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                    "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
                    "base": 2,
                },
            },
            **({"skip_signature": True} if address.is_on("anonymous") else {}),
            **own,
        )
    except (importlib.import_module("obstore.exceptions").BaseError, ValueError) as error:
        reason = " ".join(str(error).partition("Debug source:")[0].split())
        raise InvalidInput(f"Could not make a client for {address.place}: {reason}") from None


def _s3_settings(address: Address, endpoint: str) -> dict[str, Any]:
    # Over http the signature must cover the body: it is the only check that every server makes. Its SHA-256
    # is also sent as a checksum. Over https the connection protects the body, so a CRC, which takes a quarter
    # of the time, is enough.
    is_plain = endpoint.startswith("http://")
    checksum = address.option("checksum") or ("sha256" if is_plain else "crc64nvme")
    is_anonymous = address.is_on("anonymous")
    optional = {
        "checksum_algorithm": None if checksum == "none" else checksum,
        "endpoint": endpoint,
        "region": setting(address, "region"),
        "server_side_encryption": address.option("sse"),
        "sse_kms_key_id": address.option("sse_kms_key_id"),
        "request_payer": address.is_on("requester_pays"),
        "credential_provider": None if is_anonymous else shared_credentials(address.option("profile")),
    }
    return {
        "disable_bulk_delete": True,  # not needed for single deletes, and some servers lack it
        "virtual_hosted_style_request": address.is_on("virtual_hosted"),
        "unsigned_payload": not is_plain,
        **{name: value for name, value in optional.items() if value},
    }


def _ask_region(url: str) -> str:
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


def _azure_settings(address: Address, endpoint: str) -> dict[str, Any]:
    settings = connection_settings() | ({"endpoint": endpoint} if endpoint else {})
    account = setting(address, "account")
    if not account:
        raise InvalidInput(
            f"{address.place} does not name a storage account. Set AZURE_STORAGE_ACCOUNT_NAME, "
            "or append ?account=NAME to the URL."
        )
    return {**settings, "account_name": account}
