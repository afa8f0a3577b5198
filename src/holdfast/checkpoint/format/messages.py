"""Messages between ranks: JSON with tagged types and errors, so that receiving one runs no code."""

from __future__ import annotations

import json
from typing import Any

from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.format.values import decode, encode
from holdfast.errors import ERRORS, Corrupt, HoldfastError

MAX_BYTES = 256 << 20
"""Maximum size of a message. The largest ones contain the parts of a checkpoint, a few MB each."""


def pack(value: Any) -> bytes:
    """Return a value as bytes for `unpack`.

    Args:
        value: a value for `values.encode`, a `HoldfastError`, or a tuple of these.
    """
    return dumps(_packed(value))


def unpack(data: bytes | bytearray, sender: str) -> Any:
    """Return the value in a message."""
    if len(data) > MAX_BYTES:
        raise Corrupt(f"A message from {sender} has {len(data)} bytes; the limit is {MAX_BYTES}.")
    try:
        return _unpacked(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, HoldfastError) as error:
        raise Corrupt(
            f"A message from {sender} is not Holdfast's: {type(error).__name__}. Another version of Holdfast "
            "on that rank, or another program, sent it. It was not used."
        ) from error


def _packed(value: Any) -> dict[str, Any]:
    if isinstance(value, HoldfastError):
        name = next(base.__name__ for base in type(value).__mro__ if base in ERRORS.values())
        return {"error": [name, str(value), value.step, value.rank, value.key]}
    if type(value) is tuple:
        return {"tuple": [_packed(item) for item in value]}
    return {"value": encode(value, "message")}


def _unpacked(body: Any) -> Any:
    if not isinstance(body, dict):
        raise TypeError(f"a message is an object, not {type(body).__name__}")
    ((form, content),) = body.items()
    if form == "tuple":
        return tuple(_unpacked(item) for item in content)
    if form == "error":
        kind, text, step, rank, key = content
        return ERRORS[kind](str(text), step=step, rank=rank, key=key)
    if form != "value":
        raise KeyError(form)
    return decode(content)
