"""What an object store's client says went wrong, sorted by what can be done about it; shows no secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from holdfast.redaction import redact


class Kind(Enum):
    """What a refusal means for the call."""

    ABSENT = "there is no such object"
    NO_BUCKET = "there is no such bucket"
    TAKEN = "the name is taken, or somebody else is writing it"
    PAST_END = "the object ends before the range begins"
    CREDENTIALS = "the store does not know or not allow us"
    PASSING = "the same request may succeed soon"
    LASTING = "the same request would fail again"
    NOT_OFFERED = "the server has no such feature"
    NAME = "no object can have this name"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request failed. `why` is one line, for people, without secrets."""

    kind: Kind
    why: str


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
_QUERY = re.compile(r"(https?://[^\s?\"']*)\?[^\s\"',)]*")
_SECRET_WORDS = re.compile(
    r"((?:signature|sig|token|secret|password|authorization|credential)[A-Za-z_-]*[\"']?\s*[=:]\s*[\"']?)[^\s&,;\"'<)]+",
    re.IGNORECASE,
)
_MAX_CHARS = 400

# Where a machine's own keys come from; asked when nothing else gave any, so its silence is no passing fault.
_HOSTS_OF_KEYS = ("://169.254.", "://metadata", "://login.microsoftonline.")
# The client looks at ranges too, and some servers answer one of an empty object with nonsense.
_PAST_END = ("InvalidRangeRequest", "ParseContentRange")
_ON_THE_WAY = re.compile(
    r"HTTP error|sending request|response body|timed? ?out|connect|reset|broken pipe|closed|\bdns\b",
    re.IGNORECASE,
)
_BY_CODE = {
    "NoSuchBucket": Kind.NO_BUCKET,
    "ContainerNotFound": Kind.NO_BUCKET,
    "NoSuchKey": Kind.ABSENT,
    "BlobNotFound": Kind.ABSENT,
    "InvalidRange": Kind.PAST_END,
    "ConditionalRequestConflict": Kind.TAKEN,
    "PreconditionFailed": Kind.TAKEN,
    "BlobAlreadyExists": Kind.TAKEN,
    # 4xx by their numbers, yet they pass
    "RequestTimeout": Kind.PASSING,
    "IncompleteBody": Kind.PASSING,
    "BadDigest": Kind.PASSING,
    "Md5Mismatch": Kind.PASSING,
    "InvalidDigest": Kind.PASSING,
    "XAmzContentSHA256Mismatch": Kind.PASSING,
    "XAmzContentChecksumMismatch": Kind.PASSING,
    "OperationAborted": Kind.PASSING,
    "SlowDown": Kind.PASSING,
    # of the account, but no matter of keys
    "QuotaExceeded": Kind.LASTING,
    "XMinioAdminBucketQuotaExceeded": Kind.LASTING,
    # 400 by number
    "ExpiredToken": Kind.CREDENTIALS,
    "InvalidToken": Kind.CREDENTIALS,
    "TokenRefreshRequired": Kind.CREDENTIALS,
}
_BY_CLASS = {
    "AlreadyExistsError": Kind.TAKEN,
    "PreconditionError": Kind.TAKEN,
    "PermissionDeniedError": Kind.CREDENTIALS,
    "UnauthenticatedError": Kind.CREDENTIALS,
    "InvalidPathError": Kind.NAME,
}


def classify(error: Exception) -> Refusal:
    """Sort an error that the client raised."""
    text = str(error)
    said = text.partition("Debug source:")[0]
    code = _CODE.search(said)
    status = _STATUS.search(said)
    why = _in_one_line(said, status[1] if status else None, code[1] if code else None)
    if code and code[1] in _BY_CODE:
        return Refusal(_BY_CODE[code[1]], why)
    return Refusal(_kind_of(error, text, int(status[1]) if status else None), why)


def _kind_of(error: Exception, text: str, status: int | None) -> Kind:
    by_class = _BY_CLASS.get(type(error).__name__)
    if by_class is not None:
        return by_class
    if isinstance(error, FileNotFoundError):
        return Kind.ABSENT
    if any(host in text for host in _HOSTS_OF_KEYS):
        return Kind.CREDENTIALS
    if isinstance(error, ValueError):
        return Kind.NAME
    if status in (405, 501):
        return Kind.NOT_OFFERED
    if status is None:
        return _kind_without_status(text)
    if status >= 500 or status in (408, 429):
        return Kind.PASSING
    if status in (401, 403):
        return Kind.CREDENTIALS
    return Kind.PAST_END if status == 416 else Kind.LASTING


def _kind_without_status(text: str) -> Kind:
    """No answer, or one that the client could not make sense of."""
    if any(word in text for word in _PAST_END):
        return Kind.PAST_END
    return Kind.PASSING if _ON_THE_WAY.search(text) else Kind.LASTING


def _in_one_line(said: str, status: str | None, code: str | None) -> str:
    """What the client said, without the server's whole answer and without what may be secret."""
    line = " ".join(said.partition("<?xml")[0].partition("<Error>")[0].split()).rstrip(" :-")
    line = _SECRET_WORDS.sub(r"\1...", _QUERY.sub(r"\1", redact(line)))
    if code and code not in line:
        line = f"{line} ({code})" if status else f"{line}: {code}"
    return line if len(line) <= _MAX_CHARS else line[:_MAX_CHARS] + " ..."
