"""Checks of the bodies of value tags, which may contain anything; pure."""

from __future__ import annotations

import base64
from typing import Any

from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES
from holdfast.system.documents import MAX_TEXT_CHARS, shown


class Refused(Exception):
    """The body of a tag is invalid."""


def read_text(body: Any, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Return a body that is a text of limited length."""
    if type(body) is not str or len(body) > max_chars:
        raise Refused(f"expected a text of at most {max_chars} characters, found {shown(body)}")
    return body


def read_array(body: Any, count: int | None = None) -> list[Any]:
    """Return a body that is an array, of `count` items if given."""
    if type(body) is not list or count not in (None, len(body)):
        raise Refused(f"expected an array{'' if count is None else f' of {count}'}, found {shown(body)}")
    return body


def read_object(body: Any) -> dict[str, Any]:
    """Return a body that is an object."""
    if type(body) is not dict:
        raise Refused(f"expected an object, found {shown(body)}")
    return body


def read_integer(body: Any) -> int:
    """Return a body that is an integer."""
    if type(body) is not int:
        raise Refused(f"expected an integer, found {shown(body)}")
    return body


def read_bytes(body: Any) -> bytes:
    """Return the bytes that a body has as base64."""
    return base64.b64decode(read_text(body, MAX_DOCUMENT_BYTES), validate=True)
