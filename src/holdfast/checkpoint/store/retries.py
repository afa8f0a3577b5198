"""Failures of requests to an object store: their errors, and retries while they may pass, until a limit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.checkpoint.store.address import S3, Address
from holdfast.checkpoint.store.clients import Clients, ask_region, region_of
from holdfast.checkpoint.store.command_limit import command_limit
from holdfast.checkpoint.store.error_codes import (
    BY_CODE,
    CLOCK,
    FULL,
    NOT_TLS,
    NOT_TRUSTED,
    REGION,
    RENEW,
    TLS,
    ErrorKind,
)
from holdfast.errors import Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported, redact
from holdfast.system import backoff
from holdfast.system.units import format_duration, plural


@dataclass(frozen=True, slots=True)
class ClientError:
    """Classified error of a request. Neither text has secrets."""

    kind: ErrorKind
    reason: str  # one line for people
    advice: str = ""  # sentences with the way out, if it is not that of the kind
    region: str = ""  # of the bucket, if the store has named it
    url: str = ""  # of a request that was refused without a reason, which the store may give to others


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<]{1,300})")
_REGION = re.compile(r"<Region>\s*([a-z0-9-]+)\s*</Region>|expecting '([a-z0-9-]+)'")
_SERVER_TIME = re.compile(r"<ServerTime>\s*([0-9TZ:.-]+)\s*</ServerTime>")
_URL = re.compile(r"https?://[^\s\"']+")
_QUERY = re.compile(r"(https?://[^\s?\"']*)\?[^\s\"',)]*")
_SECRET_WORDS = re.compile(
    r"((?:signature|sig|token|secret|password|authorization|credential)[A-Za-z_-]*[\"']?\s*[=:]\s*[\"']?)[^\s&,;\"'<)]+",
    re.IGNORECASE,
)
_MAX_CHARS = 400

# Sources of a machine's own keys, tried after all others, so that failures there do not pass by themselves.
_HOSTS_OF_KEYS = ("://169.254.", "://metadata", "://login.microsoftonline.")
# The client checks ranges too, and some servers answer a range of an empty object with nonsense.
_PAST_END = ("InvalidRangeRequest", "ParseContentRange")
_CONNECTION = re.compile(
    r"HTTP error|sending request|response body|timed? ?out|connect|reset|broken pipe|closed|\bdns\b",
    re.IGNORECASE,
)
_CAUSE = re.compile(r'message: "([^"]+)"|(dns error|operation timed out|TimedOut)')
"""Causes of a failed connection in the client's details, which its message leaves out."""
_BARE_REDIRECT = "redirect without LOCATION"
_BY_TEXT: tuple[tuple[re.Pattern[str], ErrorKind, str], ...] = (
    # Google's and Azure's only texts for a clock, under codes that mean more
    (re.compile(r"date header too (?:old|new)|short-lived token", re.IGNORECASE), ErrorKind.CLOCK, CLOCK),
    (re.compile(_BARE_REDIRECT), ErrorKind.MISCONFIGURED, REGION),
    (re.compile(r"HTTP request (?:was sent )?to (?:an )?HTTPS", re.IGNORECASE), ErrorKind.MISCONFIGURED, TLS),
    (re.compile(r"Parse\(\s*Version"), ErrorKind.MISCONFIGURED, TLS),
    (re.compile(r"InvalidMessage\(\s*InvalidContentType"), ErrorKind.MISCONFIGURED, NOT_TLS),
    (re.compile(r"InvalidCertificate\("), ErrorKind.MISCONFIGURED, NOT_TRUSTED),
)
_BY_CLASS = {
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), ErrorKind.TAKEN),
    **dict.fromkeys(("PermissionDeniedError", "UnauthenticatedError"), ErrorKind.DENIED),
    "InvalidPathError": ErrorKind.NAME,
}
_BY_STATUS = {
    **dict.fromkeys((401, 402, 403), ErrorKind.DENIED),
    **dict.fromkeys((408, 425, 429), ErrorKind.PASSING),
    **dict.fromkeys((405, 501), ErrorKind.NOT_OFFERED),
    416: ErrorKind.PAST_END,
    507: ErrorKind.FULL,
}
_ADVICE = {ErrorKind.DENIED: RENEW, ErrorKind.FULL: FULL}


def classify(error: Exception) -> ClientError:
    """Classify an error that the client raised."""
    text = str(error)
    message, _, details = text.partition("Debug source:")
    code = found[1] if (found := _CODE.search(message)) else None
    status = int(found[1]) if (found := _STATUS.search(message)) else None
    kind, advice = _kind_and_advice(error, message, details, code, status)
    region = _REGION.search(message)
    url = _URL.search(message) if _BARE_REDIRECT in message else None
    return ClientError(
        kind,
        _in_one_line(message, details, status, code),
        advice or _ADVICE.get(kind, ""),
        (region[1] or region[2]) if region else "",
        url[0] if url else "",
    )


def _kind_and_advice(
    error: Exception, message: str, details: str, code: str | None, status: int | None
) -> tuple[ErrorKind, str]:
    for pattern, kind, advice in _BY_TEXT:
        if pattern.search(message) or (status is None and pattern.search(details)):
            return kind, advice
    if code in BY_CODE:
        return BY_CODE[code]
    return _kind_of(error, message, details, status), ""


def _kind_of(error: Exception, message: str, details: str, status: int | None) -> ErrorKind:
    """Return the kind of an error by its class, host or status."""
    by_class = _BY_CLASS.get(type(error).__name__)
    if by_class is not None:
        return by_class
    if isinstance(error, FileNotFoundError):
        return ErrorKind.ABSENT
    if any(host in message + details for host in _HOSTS_OF_KEYS):
        return ErrorKind.DENIED
    if isinstance(error, ValueError):
        return ErrorKind.NAME
    if status is not None:
        return _BY_STATUS.get(status, ErrorKind.PASSING if status >= 500 else ErrorKind.LASTING)
    # There was no answer, or one that the client could not parse.
    if any(word in message + details for word in _PAST_END):
        return ErrorKind.PAST_END
    # The details name settings such as `retry_timeout`, and a URL may have any word.
    is_of_connection = _CONNECTION.search(_URL.sub("", message)) or "HttpError" in details
    return ErrorKind.PASSING if is_of_connection else ErrorKind.LASTING


def _in_one_line(message: str, details: str, status: int | None, code: str | None) -> str:
    """Return the client's message without the server's full answer and without possible secrets."""
    line = " ".join(message.partition("<?xml")[0].partition("<Error>")[0].split()).rstrip(" :-")
    if code and code not in line:
        line = f"{line} ({code})" if status else f"{line}: {code}"
    if found := _SERVER_TIME.search(message):
        line = f"{line}: the time of the store is {found[1]}"
    elif found := _MESSAGE.search(message):
        line = f"{line}: {' '.join(found[1].split())}"
    elif status is None and (found := _CAUSE.search(details)):
        line = f"{line}: {found[1] or found[2]}"
    line = _SECRET_WORDS.sub(r"\1...", _QUERY.sub(r"\1", redact(line))).rstrip(".")
    return line if len(line) <= _MAX_CHARS else line[:_MAX_CHARS] + " ..."


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_T = TypeVar("_T")


class TryAgain(Exception):
    """Request for another try, raised from the client's error."""


@dataclass(slots=True)
class StoreRequest:
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


class Retries:
    """Sender of requests to an address: retries transient failures, and reads credentials again once."""

    def __init__(self, address: Address, clients: Clients) -> None:
        self._address = address
        self._clients = clients

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
                client = self._clients.get(retrying=retrying)
                try:
                    return act(client)
                except HoldfastError:
                    raise
                except TryAgain as error:
                    client_error = ClientError(ErrorKind.PASSING, str(error))
                except self._clients.client_errors as error:
                    client_error = classify(error)
                if client_error.kind is ErrorKind.PAST_END and past_end is not None:
                    return past_end
                if client_error.kind is ErrorKind.DENIED and not is_renewed:
                    is_renewed = True  # keys may have been renewed since the client read them
                    self._clients.drop()
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
        used = region_of(self._address) or "us-east-1, the default"
        region = client_error.region or (ask_region(client_error.url) if client_error.url else "")
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
