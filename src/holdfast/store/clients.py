"""Makes the client of an object store from its address and the environment, one for each process."""

from __future__ import annotations

import importlib
import os
import threading
from datetime import timedelta
from typing import Any

from holdfast.errors import InvalidInput, Unsupported
from holdfast.store.address import AZURE, GCS, S3, Address
from holdfast.store.credentials import shared_credentials, shared_region
from holdfast.store.endpoints import NAMED_BY, first_set, read_connection_string
from holdfast.store.haste import haste

_CONNECT_TIMEOUT_S = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_MANY_TRIES = 10_000  # the time limit ends them

_used_by: int | None = None  # process that has used the client library, whose threads a fork does not copy


def load_library() -> Any:
    """The module `obstore`.

    Raises:
        Unsupported: it is not installed.
    """
    try:
        return importlib.import_module("obstore")
    except ImportError:
        message = (
            "Object stores need the package obstore (Python 3.11 or newer), which is not installed: "
            "pip install 'torch-holdfast[remote]'."
        )
        raise Unsupported(message) from None


def check_process(place: str) -> None:
    """Refuse to go on in a process that was forked from one that has used an object store.

    Raises:
        Unsupported: this is such a process; the client would wait for threads that it has not.
    """
    if _used_by not in (None, os.getpid()):
        raise Unsupported(
            f"{place} was to be used in a process that was forked from one that has used an object store; "
            "the client's threads do not cross a fork, so the call would hang. Nothing was done. Start such "
            "processes by 'spawn' or 'forkserver' (DataLoader: multiprocessing_context='spawn'), or use the "
            "store in the parent only."
        )


class Clients:
    """The clients for one address: one that leaves trying again to the caller, and one that does it itself.

    Nothing is opened before the first use, so that a process may fork before it.
    """

    def __init__(self, address: Address) -> None:
        load_library()
        self.refusals: tuple[type[Exception], ...] = (*_client_errors(), ValueError, OSError)
        """What calls of the library raise when the store, or the way to it, refuses."""
        self._address = address
        self._lock = threading.Lock()
        self._made: dict[bool, Any] = {}

    def get(self, *, patient: bool = False) -> Any:
        """The client; a `patient` one tries each request again until the address's time limit.

        Raises:
            Unsupported: this process was forked after first use.
            InvalidInput: the environment's settings cannot be used.
        """
        global _used_by
        check_process(self._address.place)
        _used_by = os.getpid()
        with self._lock:
            if patient not in self._made:
                self._made[patient] = _make_client(self._address, patient=patient)
            return self._made[patient]

    def drop(self) -> None:
        """Forget the clients; the next use reads keys and settings anew."""
        with self._lock:
            self._made.clear()


def _make_client(address: Address, *, patient: bool) -> Any:
    stores = importlib.import_module("obstore.store")
    endpoint = address.option("endpoint_url") or first_set(NAMED_BY[address.protocol])
    settings: dict[str, Any] = {"skip_signature": True} if address.is_on("anonymous") else {}
    make, own = {
        S3: (stores.S3Store, _s3_settings),
        GCS: (stores.GCSStore, _gcs_settings),
        AZURE: (stores.AzureStore, _azure_settings),
    }[address.protocol]
    settings.update(own(address, endpoint))
    endpoint = settings.get("endpoint") or endpoint
    try:
        return make(
            address.bucket,
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
                "timeout": timedelta(seconds=_request_timeout_s(address, patient=patient)),
            },
            retry_config=_retries(address, patient=patient),
            **settings,
        )
    except (*_client_errors(), ValueError) as error:
        said = " ".join(str(error).partition("Debug source:")[0].split())
        raise InvalidInput(f"No client for {address.place} could be made: {said}") from None


def _client_errors() -> tuple[type[Exception], ...]:
    return (importlib.import_module("obstore.exceptions").BaseError,)


def _request_timeout_s(address: Address, *, patient: bool) -> float:
    """Seconds for one request; those of a patient client carry large parts, and may take long."""
    if patient or haste.limit_s is None:
        return address.request_timeout_s
    return max(min(address.request_timeout_s, haste.limit_s), 1.0)


def _retries(address: Address, *, patient: bool) -> dict[str, Any]:
    return {
        "max_retries": _MANY_TRIES if patient else 0,
        "retry_timeout": timedelta(seconds=min(address.timeout_s, haste.limit_s or address.timeout_s)),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
            "base": 2,
        },
    }


def _s3_settings(address: Address, endpoint: str | None) -> dict[str, Any]:
    profile = address.option("profile")
    settings: dict[str, Any] = {
        "disable_bulk_delete": True,  # one name at a time is deleted here, and some servers lack the other
        "virtual_hosted_style_request": address.is_on("virtual_hosted"),
        **_guarded_bodies(address, endpoint),
    }
    if endpoint:
        settings["endpoint"] = endpoint.rstrip("/")
    known = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region := address.option("region") or known or shared_region(profile):
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


def _guarded_bodies(address: Address, endpoint: str | None) -> dict[str, Any]:
    """How the server can tell that a body arrived whole.

    Over http the signature has to cover the body: it is the only guard that every server checks, and its
    SHA-256 is sent as a checksum too. Over https the connection guards the way, so a CRC that costs a
    quarter of the time is enough.
    """
    is_plain = bool(endpoint and endpoint.startswith("http://"))
    checksum = address.option("checksum") or ("sha256" if is_plain else "crc64nvme")
    settings: dict[str, Any] = {"unsigned_payload": not is_plain}
    return settings if checksum == "none" else {**settings, "checksum_algorithm": checksum}


def _gcs_settings(_address: Address, endpoint: str | None) -> dict[str, Any]:
    return {"base_url": endpoint.rstrip("/")} if endpoint else {}


def _azure_settings(address: Address, endpoint: str | None) -> dict[str, Any]:
    settings = read_connection_string(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    if endpoint:
        settings["endpoint"] = endpoint.rstrip("/")
    account = address.option("account") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if account:
        settings["account_name"] = account
    if "account_name" not in settings:
        raise InvalidInput(
            f"{address.place} does not say which storage account it is in: set AZURE_STORAGE_ACCOUNT_NAME, "
            "or write ?account=NAME behind the URL."
        )
    return settings
