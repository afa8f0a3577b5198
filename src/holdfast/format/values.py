"""Non-tensor state as JSON with tagged types; decoding never runs code.

A value that JSON supports natively is stored as it is. Every other supported type is an object with one
member whose name starts with `$`. Tensors are not values: the caller replaces them by `TensorRef` first.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import importlib
import math
import pathlib
import re
import sys
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.documents import MAX_NUMBER_CHARS, MAX_TEXT_CHARS, is_text, read_integers, shown
from holdfast.errors import Corrupt, InvalidInput, Unsupported
from holdfast.format.limits import MAX_DIMS, MAX_DOCUMENT_BYTES, MAX_VALUE_DEPTH

_SAFE_INT = 2**53
_MAX_INT_BITS = 8192  # Python reads and writes decimal integers up to 4300 digits
_MAX_INT_DIGITS = 2467  # of these many bits
_INT = re.compile(rf"-?[0-9]{{1,{_MAX_INT_DIGITS}}}")
_DTYPE = re.compile(r"[<>|=]?[biufcmMSUV][0-9]{0,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
_MAX_DECIMAL_CHARS = 4096
_MAX_CLASHES = 10**7  # comparisons of items with the same hash, in one set or dict
_MAX_SIZE = 2**63 - 1
_MAX_EMPTY_ITEMS = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Placeholder for a tensor in a tree of values; `name` is its key in the data files."""

    name: str


def encode(value: Any, path: str) -> Any:
    """Encode a value as JSON with tagged types.

    Args:
        path: key path of the value, for the error.

    Raises:
        InvalidInput: a type or value in it cannot be saved, named with its key path.
    """
    try:
        encoded = _encode(value, path)
    except RecursionError as error:
        raise _too_deep(path) from error
    if _is_deeper(encoded, MAX_VALUE_DEPTH):
        raise _too_deep(path)
    return encoded


def _too_deep(path: str) -> InvalidInput:
    message = (
        f"{path} contains itself, or is nested too deeply (as JSON, more than "
        f"{MAX_VALUE_DEPTH} arrays and objects in each other), so it cannot be saved. Nothing was written."
    )
    return InvalidInput(message, key=path)


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            item
            for one in level
            if type(one) in (dict, list)
            for item in (one.values() if type(one) is dict else one)
            if type(item) in (dict, list)
        ]
        if not level:
            return False
    return True


def _encode(value: Any, path: str) -> Any:
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
        return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, path)
    if encoder := _ENCODERS.get(kind):
        return encoder(value, path)
    if encoder := _foreign_encoder(value):
        return encoder(value, path)
    raise InvalidInput(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: only tensors, numbers, "
        "strings, bytes, containers of these and objects with state_dict() are supported, so that opening a "
        "checkpoint never runs code. Nothing was written. Add state_dict() and load_state_dict() to the "
        "object, or leave it out of the state.",
        key=path,
    )


def decode(value: Any) -> Any:
    """Decode a value from `encode`.

    Raises:
        Unsupported: this version does not support a tag.
        Corrupt: the content of a tag is invalid.
    """
    try:
        return _decode(value)
    except (_Refused, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise Corrupt(f"A value cannot be decoded: {str(error)[:200]}.") from error


class _Refused(Exception):
    pass


def _decode(value: Any) -> Any:
    if type(value) is list:
        return [_decode(item) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            if tag not in _DECODERS:
                raise Unsupported(
                    f"Unknown value tag {shown(tag)}: written by a newer Holdfast? Upgrade to read it."
                )
            return _DECODERS[tag](body)
    return {key: _decode(item) for key, item in value.items()}


def _checked_text(value: str, path: str) -> str:
    if not value.isascii() and not is_text(value):
        raise InvalidInput(
            f"{path} is the string {value!r}, which is not valid Unicode text (a file name that is not "
            "UTF-8?), so it cannot be saved. Nothing was written. Save it as bytes, see os.fsencode().",
            key=path,
        )
    return value


def _encode_int(value: int, path: str) -> Any:
    if value.bit_length() > _MAX_INT_BITS:
        raise InvalidInput(
            f"{path} is an integer of {value.bit_length()} bits; up to {_MAX_INT_BITS} can be saved.",
            key=path,
        )
    return {"$int": str(value)}


def _encode_dict(value: dict[Any, Any], path: str) -> Any:
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {
            _checked_text(key, f"{path}.<key {key!r}>"): _encode(item, f"{path}.{key}" if path else key)
            for key, item in value.items()
        }
    return {"$dict": _encode_items(value, path)}


def _encode_items(value: Any, path: str) -> list[Any]:
    return [[_encode(k, f"{path}.<key {k!r}>"), _encode(v, f"{path}[{k!r}]")] for k, v in value.items()]


def _encode_sequence(tag: str) -> Callable[[Any, str], Any]:
    return lambda value, path: {tag: [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}


def _encode_set(tag: str) -> Callable[[Any, str], Any]:
    def encoder(value: Any, path: str) -> Any:
        items = [_encode(item, f"{path}.<item {item!r}>") for item in value]
        return {tag: sorted(items, key=repr)}  # sets have no order: sort, so that equal sets give equal bytes

    return encoder


def _encode_deque(value: Any, path: str) -> Any:
    return {"$deque": [value.maxlen, [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]]}


def _encode_decimal(value: decimal.Decimal, path: str) -> Any:
    text = str(value)
    if len(text) > _MAX_DECIMAL_CHARS:
        raise InvalidInput(
            f"{path} is a Decimal of {len(text)} characters; up to {_MAX_DECIMAL_CHARS} can be saved.",
            key=path,
        )
    return {"$decimal": text}


def _encode_slice(value: slice, path: str) -> Any:
    bounds = {"start": value.start, "stop": value.stop, "step": value.step}
    return {"$slice": [_encode(bound, f"{path}.{name}") for name, bound in bounds.items()]}


_ENCODERS: dict[type, Callable[[Any, str], Any]] = {
    TensorRef: lambda value, path: {"$tensor": value.name},
    tuple: _encode_sequence("$tuple"),
    set: _encode_set("$set"),
    frozenset: _encode_set("$frozenset"),
    bytes: lambda value, path: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value, path: {"$bytearray": base64.b64encode(value).decode()},
    complex: lambda value, path: {"$complex": [repr(value.real), repr(value.imag)]},
    range: lambda value, path: {"$range": [value.start, value.stop, value.step]},
    slice: _encode_slice,
    decimal.Decimal: _encode_decimal,
    uuid.UUID: lambda value, path: {"$uuid": str(value)},
    collections.OrderedDict: lambda value, path: {"$odict": _encode_items(value, path)},
    collections.Counter: lambda value, path: {"$counter": _encode_items(value, path)},
    collections.deque: _encode_deque,
    datetime.datetime: lambda value, path: {"$datetime": value.isoformat()},
    datetime.date: lambda value, path: {"$date": value.isoformat()},
    datetime.timedelta: lambda value, path: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    pathlib.PosixPath: lambda value, path: {"$path": _checked_text(str(value), path)},
    pathlib.PurePosixPath: lambda value, path: {"$path": _checked_text(str(value), path)},
}

# The content of a tag may be anything: each decoder checks it.


def _text(body: Any, max_chars: int = MAX_TEXT_CHARS) -> str:
    if type(body) is not str or len(body) > max_chars:
        raise _Refused(f"expected a text of at most {max_chars} characters, found {shown(body)}")
    return body


def _array(body: Any, count: int | None = None) -> list[Any]:
    if type(body) is not list or count not in (None, len(body)):
        raise _Refused(f"expected an array{'' if count is None else f' of {count}'}, found {shown(body)}")
    return body


def _integer(body: Any) -> int:
    if type(body) is not int:
        raise _Refused(f"expected an integer, found {shown(body)}")
    return body


def _bytes(body: Any) -> bytes:
    return base64.b64decode(_text(body, MAX_DOCUMENT_BYTES), validate=True)


def _decode_int(body: Any) -> int:
    digits = _text(body, _MAX_INT_DIGITS + 1)
    if not _INT.fullmatch(digits):
        raise _Refused(f"expected an integer, found {shown(digits)}")
    return int(digits)


def _decode_float(body: Any) -> float:
    return float(_text(body, MAX_NUMBER_CHARS))


def _hashable(items: Iterable[Any]) -> list[Any]:
    """Return the items. Raise if too many have the same hash to make a set of them quickly."""
    found = list(items)
    alike = collections.Counter(map(hash, found))
    if sum(count * count for count in alike.values() if count > 1) > _MAX_CLASHES:
        raise _Refused(f"too many of {len(found)} items have the same hash")
    return found


def _decode_pairs(body: Any) -> list[tuple[Any, Any]]:
    rows = [_array(row, 2) for row in _array(body)]
    keys = _hashable(_decode(key) for key, _ in rows)
    return [(key, _decode(value)) for key, (_, value) in zip(keys, rows, strict=True)]


def _decode_deque(body: Any) -> Any:
    length, items = _array(body, 2)
    if length is not None and not 0 <= _integer(length) <= sys.maxsize:
        raise _Refused(f"a deque of length {shown(length)}")
    return collections.deque((_decode(item) for item in _array(items)), maxlen=length)


def _decode_timedelta(body: Any) -> datetime.timedelta:
    days, seconds, microseconds = map(_integer, _array(body, 3))
    return datetime.timedelta(days, seconds, microseconds)


def _decode_decimal(body: Any) -> decimal.Decimal:
    text = _text(body, _MAX_DECIMAL_CHARS)
    found = decimal.Decimal(text)
    if str(found) != text:  # Python also accepts spaces, underscores and other digits
        raise _Refused(f"expected a decimal number, found {shown(text)}")
    return found


def _decode_uuid(body: Any) -> uuid.UUID:
    text = _text(body, 36)
    found = uuid.UUID(text)
    if str(found) != text:
        raise _Refused(f"expected a UUID, found {shown(text)}")
    return found


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tensor": lambda body: TensorRef(_text(body)),
    "$int": _decode_int,
    "$float": _decode_float,
    "$tuple": lambda body: tuple(_decode(item) for item in _array(body)),
    "$set": lambda body: set(_hashable(_decode(item) for item in _array(body))),
    "$frozenset": lambda body: frozenset(_hashable(_decode(item) for item in _array(body))),
    "$bytes": _bytes,
    "$bytearray": lambda body: bytearray(_bytes(body)),
    "$complex": lambda body: complex(*map(_decode_float, _array(body, 2))),
    "$range": lambda body: range(*map(_integer, _array(body, 3))),
    "$slice": lambda body: slice(*map(_decode, _array(body, 3))),
    "$decimal": _decode_decimal,
    "$uuid": _decode_uuid,
    "$dict": lambda body: dict(_decode_pairs(body)),
    "$odict": lambda body: collections.OrderedDict(_decode_pairs(body)),
    "$counter": lambda body: collections.Counter(dict(_decode_pairs(body))),
    "$deque": _decode_deque,
    "$datetime": lambda body: datetime.datetime.fromisoformat(_text(body, 64)),
    "$date": lambda body: datetime.date.fromisoformat(_text(body, 64)),
    "$timedelta": _decode_timedelta,
    "$path": lambda body: pathlib.Path(_text(body)),
    "$ndarray": lambda body: _decode_ndarray(body),
    "$npscalar": lambda body: _decode_ndarray(body)[()],
    "$torch": lambda body: _decode_torch(body),
}


def _foreign_encoder(value: Any) -> Callable[[Any, str], Any] | None:
    """Return the encoder for a numpy or torch value. Checks only modules that are already imported."""
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
    # An extension dtype such as bfloat16 has the str "<V2", and would be restored as two opaque bytes.
    if kind.hasobject or kind.names or kind != numpy.dtype(kind.str):
        raise InvalidInput(
            f"{path} is a numpy array of dtype {kind}; only plain dtypes can be saved.", key=path
        )
    tag = "$ndarray" if value.shape or type(value).__name__ == "ndarray" else "$npscalar"
    data = base64.b64encode(value.tobytes()).decode()
    return {tag: [kind.str, list(value.shape), data]}


def _decode_ndarray(body: Any) -> Any:
    numpy = importlib.import_module("numpy")
    name, sizes, text = _array(body, 3)
    if not _DTYPE.fullmatch(_text(name, 32)):
        raise _Refused(f"expected a plain numpy dtype, found {shown(name)}")
    dtype, shape, data = numpy.dtype(name), read_integers(sizes, max_items=MAX_DIMS), _bytes(text)
    num_items = math.prod(shape)
    if dtype.itemsize and num_items:
        if dtype.itemsize * num_items != len(data):
            raise _Refused(f"an array {name}{list(shape)} of {len(data)} bytes")
        return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()
    if num_items > _MAX_EMPTY_ITEMS:  # items without bytes, for which numpy takes memory
        raise _Refused(f"an array of {num_items} items without bytes")
    return numpy.zeros(shape, dtype)  # frombuffer takes neither


def _encode_torch(value: Any, path: str) -> Any:
    if type(value).__name__ == "Size":
        return {"$torch": ["size", list(value)]}
    return {"$torch": [type(value).__name__, str(value).removeprefix("torch.")]}


def _decode_torch(body: Any) -> Any:
    torch = importlib.import_module("torch")
    kind, value = _array(body, 2)
    if kind == "size":
        return torch.Size(read_integers(value, at_least=-_MAX_SIZE, at_most=_MAX_SIZE))
    if kind == "device":
        try:
            return torch.device(_text(value, 64))
        except RuntimeError as error:
            raise _Refused(f"no device of torch is called {shown(value)}") from error
    dtype = vars(torch).get(_text(value, 64)) if kind == "dtype" else None  # not getattr: that may import
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"Unknown torch {shown(kind)} {shown(value)} in a checkpoint.")
    return dtype
