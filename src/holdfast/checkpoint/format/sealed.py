"""Sealed documents: canonical JSON with its own xxh3-128 and a version, so that changed bits are detected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import xxhash
from msgspec import Struct

from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.limits import MAX_DEPTH, MAX_DOCUMENT_BYTES, MAX_SMALL_BYTES
from holdfast.errors import Corrupt, Unsupported
from holdfast.system.documents import decode_as, read_as, shown

_OPEN = b'{"xxh3_128":"'
_HEAD_BYTES = len(_OPEN) + 32 + 2  # the digest, then `",`


def dumps(value: Any) -> bytes:
    """Return canonical JSON: no white space, keys in the given order, UTF-8, no NaN.

    Every string must be valid Unicode, see `documents.is_text`.
    """
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def seal(body: bytes) -> bytes:
    """Return the document whose first member is the hash of `body`.

    Args:
        body: canonical JSON text of a non-empty object, from `dumps`; other lines may follow it.
    """
    return _OPEN + digest(body).encode() + b'",' + body[1:]


def seal_of(document: bytes) -> str:
    """Return the hash in the seal of a document, which `unseal_lines` has checked."""
    return document[len(_OPEN) : len(_OPEN) + 32].decode("latin-1")


def unseal_lines(document: bytes, what: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> list[bytes]:
    """Check the seal of a document, and return its lines without the seal."""
    if len(document) > max_bytes:
        raise Corrupt(
            f"{what} was not read: it has {len(document)} bytes; at most {max_bytes} are allowed.", key=what
        )
    document = bytes(document)
    is_sealed = document.startswith(_OPEN) and document[_HEAD_BYTES - 2 : _HEAD_BYTES] == b'",'
    if not is_sealed or len(document) <= _HEAD_BYTES:
        raise Corrupt(f"{what} is not a sealed Holdfast document, judged by its first bytes.", key=what)
    hashing = xxhash.xxh3_128(b"{")
    hashing.update(memoryview(document)[_HEAD_BYTES:])
    expected, found = seal_of(document), hashing.hexdigest()
    if expected != found:
        raise Corrupt(
            f"{what} does not match its own seal (expected xxh3:{expected}, found xxh3:{found}).", key=what
        )
    lines: list[bytes] = []
    start = _HEAD_BYTES
    while start <= len(document):  # not split(), which compares byte after byte
        stop = document.find(b"\n", start)
        stop = len(document) if stop < 0 else stop
        lines.append(document[start:stop])
        start = stop + 1
    lines[0] = b"{" + lines[0]
    return lines


_Members = TypeVar("_Members")


class Versions(Struct, Generic[_Members], frozen=True):
    """Versions of one kind of document that can be read, each with the type of its members.

    A new version is one more entry of `types`; the older ones stay. `written` follows when every reader in
    use can read it.
    """

    kind: str
    written: int
    types: Mapping[int, type[_Members]]

    def line(self, members: Mapping[str, Any]) -> bytes:
        """Return the first line of a document that is written."""
        return dumps({"format": self.kind, "version": self.written, **members})

    def read(self, line: bytes, what: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> _Members:
        """Return the members in the first line of a document, as the version that it states has them."""
        body = decode_as(dict[str, Any], line, what, max_bytes=max_bytes, max_depth=MAX_DEPTH)
        kind, version = body.get("format"), body.get("version")
        if kind != self.kind:
            raise Corrupt(f"{what} is a {shown(kind)} document, expected {self.kind!r}.", key=what)
        if type(version) is not int or version not in self.types:
            raise Unsupported(
                f"{what} has format version {shown(version)}; this Holdfast reads up to {max(self.types)}. "
                "Upgrade it.",
                key=what,
            )
        return read_as(self.types[version], body, what)

    def unseal(self, document: bytes, what: str, *, max_bytes: int = MAX_SMALL_BYTES) -> _Members:
        """Return the members of a sealed document of one line, after checking the seal."""
        line = b"\n".join(unseal_lines(document, what, max_bytes=max_bytes))
        return self.read(line, what, max_bytes=max_bytes)


def facts_of(value: Struct, kind: type[Struct]) -> dict[str, Any]:
    """Return the members that a value has by one of its base classes."""
    return {name: getattr(value, name) for name in kind.__struct_fields__}
