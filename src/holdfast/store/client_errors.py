"""Classification of the errors of an object store's client, by what the caller can do. Hides secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from holdfast.redaction import redact


class ErrorKind(Enum):
    """Kinds of client errors."""

    ABSENT = "the object does not exist"
    NO_BUCKET = "the bucket does not exist"
    TAKEN = "the name is in use, or another writer is writing it"
    PAST_END = "the object ends before the range begins"
    CREDENTIALS = "the store rejects the credentials, or they do not allow this"
    PASSING = "the same request may succeed soon"
    LASTING = "the same request would fail again"
    NOT_OFFERED = "the server does not have this feature"
    NAME = "objects cannot have this name"


@dataclass(frozen=True, slots=True)
class ClientError:
    """Classified error of a request. `reason` is one line for people, without secrets."""

    kind: ErrorKind
    reason: str


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
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
_BY_CODE = {
    "NoSuchBucket": ErrorKind.NO_BUCKET,
    "ContainerNotFound": ErrorKind.NO_BUCKET,
    "NoSuchKey": ErrorKind.ABSENT,
    "BlobNotFound": ErrorKind.ABSENT,
    "InvalidRange": ErrorKind.PAST_END,
    "ConditionalRequestConflict": ErrorKind.TAKEN,
    "PreconditionFailed": ErrorKind.TAKEN,
    "BlobAlreadyExists": ErrorKind.TAKEN,
    # 4xx by number, but transient
    "RequestTimeout": ErrorKind.PASSING,
    "IncompleteBody": ErrorKind.PASSING,
    "BadDigest": ErrorKind.PASSING,
    "Md5Mismatch": ErrorKind.PASSING,
    "InvalidDigest": ErrorKind.PASSING,
    "XAmzContentSHA256Mismatch": ErrorKind.PASSING,
    "XAmzContentChecksumMismatch": ErrorKind.PASSING,
    "OperationAborted": ErrorKind.PASSING,
    "SlowDown": ErrorKind.PASSING,
    # about the account, but not about keys
    "QuotaExceeded": ErrorKind.LASTING,
    "XMinioAdminBucketQuotaExceeded": ErrorKind.LASTING,
    # 400 by number
    "ExpiredToken": ErrorKind.CREDENTIALS,
    "InvalidToken": ErrorKind.CREDENTIALS,
    "TokenRefreshRequired": ErrorKind.CREDENTIALS,
}
_BY_CLASS = {
    "AlreadyExistsError": ErrorKind.TAKEN,
    "PreconditionError": ErrorKind.TAKEN,
    "PermissionDeniedError": ErrorKind.CREDENTIALS,
    "UnauthenticatedError": ErrorKind.CREDENTIALS,
    "InvalidPathError": ErrorKind.NAME,
}


def classify(error: Exception) -> ClientError:
    """Classify an error that the client raised."""
    text = str(error)
    message = text.partition("Debug source:")[0]
    code = _CODE.search(message)
    status = _STATUS.search(message)
    reason = _in_one_line(message, status[1] if status else None, code[1] if code else None)
    if code and code[1] in _BY_CODE:
        return ClientError(_BY_CODE[code[1]], reason)
    return ClientError(_kind_of(error, text, int(status[1]) if status else None), reason)


def _kind_of(error: Exception, text: str, status: int | None) -> ErrorKind:
    by_class = _BY_CLASS.get(type(error).__name__)
    if by_class is not None:
        return by_class
    if isinstance(error, FileNotFoundError):
        return ErrorKind.ABSENT
    if any(host in text for host in _HOSTS_OF_KEYS):
        return ErrorKind.CREDENTIALS
    if isinstance(error, ValueError):
        return ErrorKind.NAME
    if status in (405, 501):
        return ErrorKind.NOT_OFFERED
    if status is None:
        return _kind_without_status(text)
    if status >= 500 or status in (408, 429):
        return ErrorKind.PASSING
    if status in (401, 403):
        return ErrorKind.CREDENTIALS
    return ErrorKind.PAST_END if status == 416 else ErrorKind.LASTING


def _kind_without_status(text: str) -> ErrorKind:
    """Return the kind of an error without a status: no answer, or one that the client could not parse."""
    if any(word in text for word in _PAST_END):
        return ErrorKind.PAST_END

    return ErrorKind.PASSING if _CONNECTION.search(text) else ErrorKind.LASTING


def _in_one_line(message: str, status: str | None, code: str | None) -> str:
    """Return the client's message without the server's full answer and without possible secrets."""
    line = " ".join(message.partition("<?xml")[0].partition("<Error>")[0].split()).rstrip(" :-")
    line = _SECRET_WORDS.sub(r"\1...", _QUERY.sub(r"\1", redact(line)))
    if code and code not in line:
        line = f"{line} ({code})" if status else f"{line}: {code}"
    return line if len(line) <= _MAX_CHARS else line[:_MAX_CHARS] + " ..."
