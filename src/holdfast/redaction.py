"""Redaction of messages: secrets are left out, and control characters cannot reach a terminal; pure."""

from __future__ import annotations

import re

_NAMES = (
    r"(?:[\w.-]{0,40}(?:signature|token|secret|passw(?:or)?d|credential|api[_-]?key|access[_-]?key(?:[_-]?id)?"
    r"|account[_-]?key)(?:[_.-][\w.-]{0,20})?|sig|sas|x-(?:amz|goog)-[\w-]{1,40})"
)
# Compiled at first use, as that takes 4 ms and most processes print nothing that needs it. `re` caches them.
_USER = r"(?i)(?<![a-z0-9+.-])(https?://)[^\s/'\"<>]{1,512}@"
_PASSWORD = r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^\s/'\"<>:]{0,256}:[^\s/'\"<>]{0,256}@"
_HEADER = (
    r"(?i)(\b(?:proxy-)?authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?)"
    r"(?:(?:bearer|basic|negotiate|sharedkey|aws4-hmac-sha256)\s{1,4})?[^\s\"',;]{1,8192}"
)
_BEARER = r"(?i)\b(bearer|basic)\s{1,4}(?=[^\s\"',;]{0,256}\d)[A-Za-z0-9._~+/=:-]{8,8192}"
_ASSIGNED = rf"(?i)(?<![\w.-])({_NAMES}=)[^\s&;,'\"<>)]{{1,8192}}"
_SECRETS = (
    (_USER, r"\1...@"),
    (_PASSWORD, r"\1...@"),
    (_HEADER, r"\1..."),
    (_BEARER, r"\1 ..."),
    (_ASSIGNED, r"\1..."),
)
_MARKS = ("://", "=", "earer", "asic", "uthorization", "EARER", "ASIC", "UTHORIZATION")
_CONTROLS = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def redact(text: str) -> str:
    """Return a text without passwords of URLs, tokens of headers and values of secret parameters."""
    if not any(mark in text for mark in _MARKS):
        return text
    for pattern, kept in _SECRETS:
        text = re.sub(pattern, kept, text)
    return text


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, except tabs and line breaks.

    A name from a stranger's checkpoint could otherwise move a terminal's cursor or reorder what is read.
    """
    return re.sub(_CONTROLS, _escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
