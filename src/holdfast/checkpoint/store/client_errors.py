"""Errors of the client library of object stores, classified by what the caller can do, without secrets."""

from __future__ import annotations

import re

from msgspec import Struct

from holdfast.checkpoint.store.error_codes import (
    BY_CODE,
    CLOCK,
    FULL,
    NOT_TLS,
    NOT_TRUSTED,
    REGION,
    RENEW,
    REQUEST,
    TLS,
    ErrorKind,
)
from holdfast.errors import redact


class ClientError(Struct, frozen=True):
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
    kind = _kind_of(error, message, details, status)
    # A code of a request that Holdfast does not make: the server misunderstands it.
    return (ErrorKind.MISCONFIGURED, REQUEST) if code and kind is ErrorKind.LASTING else (kind, "")


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
