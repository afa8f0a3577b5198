"""Non-tensor state as JSON with tagged types, and back; nothing here can run code when read.

A value that JSON holds natively stands as itself. Every other supported type is an object with one member
whose name starts with `$`. Tensors are not values: the caller replaces them by `TensorRef` first.
"""

from __future__ import annotations

import base64
import collections
import datetime
import importlib
import math
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidInput, Unsupported
from holdfast.format.sealed import is_text

_SAFE_INT = 2**53
_MAX_INT_BITS = 8192  # Python reads and writes decimal integers up to 4300 digits


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor inside a tree of values: `name` is its key in the data files."""

    name: str


def encode(value: Any, path: str) -> Any:
    """JSON-able form of `value`.

    Args:
        path: key path of the value, for the error.

    Raises:
        InvalidInput: a type, or a value of it, that cannot be written, named with its key path.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _checked_text(value, path)
    if kind is int:
        return value if -_SAFE_INT < value < _SAFE_INT else _encode_int(value, path)
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, path)
    if encoder := _ENCODERS.get(kind):
        return encoder(value, path)
    if encoder := _foreign_encoder(value):
        return encoder(value, path)
    raise InvalidInput(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which has no place in a checkpoint: only "
        "tensors, numbers, strings, bytes, containers of these and objects with state_dict() can be saved, "
        "so that opening a checkpoint never runs code. Nothing was written. Give the object state_dict() and "
        "load_state_dict(), or leave it out of the state.",
        key=path,
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given.

    Raises:
        Unsupported: a tag that this version does not know.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            if tag not in _DECODERS:
                raise Unsupported(
                    f"Unknown value tag {tag!r}: written by a newer Holdfast? Upgrade to read it."
                )
            return _DECODERS[tag](body)
    return {key: decode(item) for key, item in value.items()}


def _checked_text(value: str, path: str) -> str:
    if not value.isascii() and not is_text(value):
        message = (
            f"{path} is the string {value!r}, which is not valid Unicode text (a file name that is not "
            "UTF-8?), so it cannot be saved. Nothing was written. Save it as bytes, see os.fsencode()."
        )
        raise InvalidInput(message, key=path)
    return value


def _encode_int(value: int, path: str) -> Any:
    if value.bit_length() > _MAX_INT_BITS:
        message = f"{path} is an integer of {value.bit_length()} bits; up to {_MAX_INT_BITS} can be saved."
        raise InvalidInput(message, key=path)
    return {"$int": str(value)}


def _encode_dict(value: dict[Any, Any], path: str) -> Any:
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {
            _checked_text(key, f"{path}.<key {key!r}>"): encode(item, f"{path}.{key}" if path else key)
            for key, item in value.items()
        }
    return {"$dict": _encode_items(value, path)}


def _encode_items(value: Any, path: str) -> list[Any]:
    return [[encode(k, f"{path}.<key {k!r}>"), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]


def _encode_sequence(tag: str) -> Callable[[Any, str], Any]:
    return lambda value, path: {tag: [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}


def _encode_set(tag: str) -> Callable[[Any, str], Any]:
    def encoder(value: Any, path: str) -> Any:
        items = [encode(item, f"{path}.<item {item!r}>") for item in value]
        return {tag: sorted(items, key=repr)}  # sets have no order: sort, so that equal sets give equal bytes

    return encoder


def _encode_deque(value: Any, path: str) -> Any:
    return {"$deque": [value.maxlen, [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]]}


def _encode_timedelta(value: datetime.timedelta, path: str) -> Any:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


_ENCODERS: dict[type, Callable[[Any, str], Any]] = {
    TensorRef: lambda value, path: {"$tensor": value.name},
    tuple: _encode_sequence("$tuple"),
    set: _encode_set("$set"),
    frozenset: _encode_set("$frozenset"),
    bytes: lambda value, path: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value, path: {"$bytearray": base64.b64encode(value).decode()},
    complex: lambda value, path: {"$complex": [repr(value.real), repr(value.imag)]},
    range: lambda value, path: {"$range": [value.start, value.stop, value.step]},
    collections.OrderedDict: lambda value, path: {"$odict": _encode_items(value, path)},
    collections.Counter: lambda value, path: {"$counter": _encode_items(value, path)},
    collections.deque: _encode_deque,
    datetime.datetime: lambda value, path: {"$datetime": value.isoformat()},
    datetime.date: lambda value, path: {"$date": value.isoformat()},
    datetime.timedelta: _encode_timedelta,
    pathlib.PosixPath: lambda value, path: {"$path": _checked_text(str(value), path)},
    pathlib.PurePosixPath: lambda value, path: {"$path": _checked_text(str(value), path)},
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tensor": TensorRef,
    "$int": int,
    "$float": float,
    "$tuple": lambda body: tuple(decode(item) for item in body),
    "$set": lambda body: {decode(item) for item in body},
    "$frozenset": lambda body: frozenset(decode(item) for item in body),
    "$bytes": base64.b64decode,
    "$bytearray": lambda body: bytearray(base64.b64decode(body)),
    "$complex": lambda body: complex(float(body[0]), float(body[1])),
    "$range": lambda body: range(*body),
    "$dict": lambda body: {decode(k): decode(v) for k, v in body},
    "$odict": lambda body: collections.OrderedDict((decode(k), decode(v)) for k, v in body),
    "$counter": lambda body: collections.Counter({decode(k): decode(v) for k, v in body}),
    "$deque": lambda body: collections.deque((decode(item) for item in body[1]), maxlen=body[0]),
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$timedelta": lambda body: datetime.timedelta(*body),
    "$path": pathlib.Path,
    "$ndarray": lambda body: _decode_ndarray(body),
    "$npscalar": lambda body: _decode_ndarray(body)[()],
    "$torch": lambda body: _decode_torch(body),
}


def _foreign_encoder(value: Any) -> Callable[[Any, str], Any] | None:
    """Encoder for a numpy or torch value; looks only at modules that are already imported."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    # Exactly ndarray: its subclasses (masked arrays, matrices) mean more than their numbers.
    if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return _encode_numpy
    if torch is not None and isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return _encode_torch
    return None


def _encode_numpy(value: Any, path: str) -> Any:
    numpy = importlib.import_module("numpy")
    kind = value.dtype
    # An extension dtype such as bfloat16 says "<V2", and would come back as two bytes of nothing.
    if kind.hasobject or kind.names or kind != numpy.dtype(kind.str):
        raise InvalidInput(
            f"{path} is a numpy array of dtype {kind}; only plain dtypes can be saved.", key=path
        )
    tag = "$ndarray" if value.shape or type(value).__name__ == "ndarray" else "$npscalar"
    data = base64.b64encode(value.tobytes()).decode()
    return {tag: [kind.str, list(value.shape), data]}


def _decode_ndarray(body: Any) -> Any:
    numpy = importlib.import_module("numpy")
    dtype, shape, data = numpy.dtype(body[0]), body[1], base64.b64decode(body[2])
    if not dtype.itemsize or 0 in shape:  # frombuffer takes neither
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _encode_torch(value: Any, path: str) -> Any:
    if type(value).__name__ == "Size":
        return {"$torch": ["size", list(value)]}
    return {"$torch": [type(value).__name__, str(value).removeprefix("torch.")]}


def _decode_torch(body: Any) -> Any:
    torch = importlib.import_module("torch")
    kind, text = body
    if kind == "size":
        return torch.Size(text)
    if kind == "device":
        return torch.device(text)
    dtype = getattr(torch, text, None) if kind == "dtype" else None
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"Unknown torch value {body!r} in a checkpoint.")
    return dtype
