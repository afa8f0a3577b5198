"""Sealed JSON documents: canonical JSON that carries its own xxh3-128, so that a flipped bit shows."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from holdfast.errors import Corrupt
from holdfast.format.hashes import digest

_OPEN = b'{"xxh3_128":"'
_HEAD_BYTES = len(_OPEN) + 32 + 2  # the digest, then `",`


def dumps(value: Any) -> bytes:
    """Canonical JSON: no white space, keys in the given order, UTF-8, no NaN.

    Every string must be text as `is_text` tells.
    """
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def is_text(text: str) -> bool:
    """False for a string with lone surrogates (a file name that is not UTF-8), which `dumps` cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def seal(body: bytes) -> bytes:
    """Document whose first member is the hash of the rest.

    Args:
        body: canonical JSON text of a non-empty object, as `dumps` makes it; other lines may follow it.
    """
    return _OPEN + digest(body).encode() + b'",' + body[1:]


def unseal(document: bytes, what: str) -> dict[str, Any]:
    """The object in a sealed document of one line, after checking the seal.

    Args:
        document: the document.
        what: its name, for the error.

    Raises:
        Corrupt: not a sealed document, or its bytes have changed.
    """
    return loads(b"\n".join(unseal_lines(document, what)), what)


def unseal_lines(document: bytes, what: str) -> list[bytes]:
    """The lines of a sealed document, the first without its seal, which has been checked.

    Raises:
        Corrupt: not a sealed document, or its bytes have changed.
    """
    document = bytes(document)
    is_sealed = document.startswith(_OPEN) and document[_HEAD_BYTES - 2 : _HEAD_BYTES] == b'",'
    if not is_sealed or len(document) <= _HEAD_BYTES:
        raise Corrupt(
            f"{what} is not a sealed Holdfast document: it begins with {document[:24]!r}.", key=what
        )
    expected, found = document[len(_OPEN) : len(_OPEN) + 32].decode("latin-1"), _digest_of_rest(document)
    if expected != found:
        message = f"{what} does not match its own seal (expected xxh3:{expected}, found xxh3:{found})."
        raise Corrupt(message, key=what)
    head, *lines = document[_HEAD_BYTES:].split(b"\n")
    return [b"{" + head, *lines]


def _digest_of_rest(document: bytes) -> str:
    hashing = xxhash.xxh3_128(b"{")
    hashing.update(memoryview(document)[_HEAD_BYTES:])
    return hashing.hexdigest()


def loads(line: bytes, what: str) -> dict[str, Any]:
    """The JSON object in a line of a sealed document.

    Raises:
        Corrupt: it is none, so somebody else has sealed it.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what} is sealed but is not JSON: {error}.", key=what) from error
    if not isinstance(value, dict):
        raise Corrupt(f"{what} is sealed but is no JSON object.", key=what)
    return value
