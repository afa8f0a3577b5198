"""Redaction of messages: secrets are left out, and control characters cannot reach a terminal; pure."""

from __future__ import annotations

import re

_NAMES = (
    r"(?:[\w.-]{0,40}(?:signature|token|secret|passw(?:or)?d|credential|api[_-]?key|access[_-]?key(?:[_-]?id)?"
    r"|account[_-]?key)(?:[_.-][\w.-]{0,20})?|sig|sas|x-(?:amz|goog)-[\w-]{1,40})"
)
_USER = re.compile(r"(?i)(?<![a-z0-9+.-])(https?://)[^\s/'\"<>]{1,512}@")
_PASSWORD = re.compile(
    r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^\s/'\"<>:]{0,256}:[^\s/'\"<>]{0,256}@"
)
_HEADER = re.compile(
    r"(?i)(\b(?:proxy-)?authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?)"
    r"(?:(?:bearer|basic|negotiate|sharedkey|aws4-hmac-sha256)\s{1,4})?[^\s\"',;]{1,8192}"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s{1,4}(?=[^\s\"',;]{0,256}\d)[A-Za-z0-9._~+/=:-]{8,8192}")
_ASSIGNED = re.compile(rf"(?i)(?<![\w.-])({_NAMES}=)[^\s&;,'\"<>)]{{1,8192}}")
_MARKS = ("://", "=", "earer", "asic", "uthorization", "EARER", "ASIC", "UTHORIZATION")
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def redact(text: str) -> str:
    """Return a text without passwords of URLs, tokens of headers and values of secret parameters."""
    if not any(mark in text for mark in _MARKS):
        return text
    text = _PASSWORD.sub(r"\1...@", _USER.sub(r"\1...@", text))
    text = _BEARER.sub(r"\1 ...", _HEADER.sub(r"\1...", text))
    return _ASSIGNED.sub(r"\1...", text)


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, except tabs and line breaks.

    A name from a stranger's checkpoint could otherwise move a terminal's cursor or reorder what is read.
    """
    return _CONTROLS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
