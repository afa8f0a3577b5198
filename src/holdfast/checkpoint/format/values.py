"""Non-tensor state as JSON with tagged types; decoding never runs code.

A value that JSON supports natively is stored as it is. Every other supported type is an object with one
member whose name starts with `$`. Tensors are not values: the caller replaces them by `TensorRef` first.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import decimal
import fractions
import io
import math
import operator
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format import array_values
from holdfast.checkpoint.format.composites import SavedTensor, check_composite, read_composite
from holdfast.checkpoint.format.limits import MAX_VALUE_DEPTH
from holdfast.checkpoint.format.value_advice import advice_for
from holdfast.errors import Corrupt, InvalidInput, Unsupported
from holdfast.system.documents import MAX_NUMBER_CHARS, is_text, shown

_SAFE_INT = 2**53
_MAX_INT_BITS = 8192  # Python reads and writes decimal integers up to 4300 digits
_MAX_INT_DIGITS = 2467  # of these many bits
_INT = re.compile(rf"-?[0-9]{{1,{_MAX_INT_DIGITS}}}")
_MAX_DECIMAL_CHARS = 4096
_MAX_CLASHES = 10**7  # comparisons of items with the same hash, in one set or dict
_MAX_TYPE_CHARS = 1024
_is_tag = operator.methodcaller("startswith", "$")


class TensorRef(Struct, frozen=True):
    """Placeholder for a tensor in a tree of values; `name` is its key in the data files."""

    name: str


class EntryRef(Struct, frozen=True):
    """Placeholder for an object in a container; `key` is its own key."""

    key: str


class SavedEnum(Struct, frozen=True):
    """An enum member: `type` is "module:qualified name" of its class, `name` is its name.

    The name of a combination of flags has all their names, joined by "|".
    """

    type: str
    name: str


class SavedNamedTuple(Struct, frozen=True):
    """A named tuple: `type` is "module:qualified name" of its class, `fields` has names with values."""

    type: str
    fields: tuple[tuple[str, Any], ...]


class SavedDataclass(Struct, frozen=True):
    """An instance of a dataclass: `type` is "module:qualified name" of its class, `fields` by name."""

    type: str
    fields: dict[str, Any]


NAMED_TYPES = (SavedEnum, SavedNamedTuple, SavedDataclass)


def encode(value: Any, path: str) -> Any:
    """Encode a value as JSON with tagged types.

    Args:
        path: key path of the value, for the error.
    """
    try:
        encoded = _encode(value, path)
    except RecursionError as error:
        raise contains_itself(path) from error
    if _is_deeper(encoded, MAX_VALUE_DEPTH):
        raise contains_itself(path)
    return encoded


def contains_itself(path: str) -> InvalidInput:
    """Return the error for a value that no walk ends in, or whose JSON no reader would parse."""
    return InvalidInput(
        f"{path} contains itself, or is nested too deeply (as JSON, more than {MAX_VALUE_DEPTH} arrays and "
        "objects in each other), so it cannot be saved. Nothing was written. Save it as a flat list, with "
        "the index of an item in place of a reference to it.",
        key=path,
    )


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
        return _encode_each(value, path)
    if kind is dict:
        return _encode_dict(value, path)
    if encoder := _ENCODERS.get(kind):
        return encoder(value, path)
    if encoder := array_values.encoder_of(value):
        return encoder(value, path)
    what = (
        f"a {kind.__module__}.{kind.__qualname__}, which cannot be saved: only tensors, numbers, strings, "
        "bytes, containers of these and objects with state_dict() are supported, so that opening a "
        "checkpoint never runs code"
    )
    raise _unsavable(path, what, advice_for(value))


def decode(value: Any) -> Any:
    """Decode a value from `encode`."""
    try:
        return _decode(value)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise Corrupt(f"A value cannot be decoded: {str(error)[:200]}.") from error


def _decode(value: Any) -> Any:
    if type(value) is list:
        return list(map(_decode, value))
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


def _unsavable(path: str, what: str, advice: str) -> InvalidInput:
    return InvalidInput(f"{path} is {what}. Nothing was written. {advice}", key=path)


def _checked_text(value: str, path: str) -> str:
    if not value.isascii() and not is_text(value):
        what = f"the string {value!r}, which is not valid Unicode text (a file name that is not UTF-8?)"
        raise _unsavable(path, f"{what}, so it cannot be saved", "Save it as bytes, see os.fsencode().")
    return value


def _encode_int(value: int, path: str) -> Any:
    if value.bit_length() > _MAX_INT_BITS:
        what = f"an integer of {value.bit_length()} bits; up to {_MAX_INT_BITS} can be saved"
        raise _unsavable(path, what, "Save it as text, hex(value), or as bytes.")
    return {"$int": str(value)}


def _encode_dict(value: dict[Any, Any], path: str) -> Any:
    if {str}.issuperset(map(type, value)) and not any(map(_is_tag, value)):
        return {
            _checked_text(key, f"{path}.<key {key!r}>"): _encode(item, f"{path}.{key}" if path else key)
            for key, item in value.items()
        }
    return {"$dict": _encode_items(value, path)}


def _encode_items(value: Any, path: str) -> list[Any]:
    return [[_encode(k, f"{path}.<key {k!r}>"), _encode(v, f"{path}[{k!r}]")] for k, v in value.items()]


def _encode_each(value: Iterable[Any], path: str) -> list[Any]:
    return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]


def _encode_set(tag: str) -> Callable[[Any, str], Any]:
    def encoder(value: Any, path: str) -> Any:
        items = [_encode(item, f"{path}.<item {item!r}>") for item in value]
        return {tag: sorted(items, key=repr)}  # sets have no order: sort, so that equal sets give equal bytes

    return encoder


def _encode_bytesio(value: io.BytesIO, path: str) -> Any:
    if value.closed:
        advice = "Save it before it is closed, or leave it out of the state."
        raise _unsavable(path, "a closed io.BytesIO, which has no content", advice)
    content = base64.b64encode(value.getvalue()).decode()
    return {"$bytesio": [content, _encode(value.tell(), path)]}


def _encode_decimal(value: decimal.Decimal, path: str) -> Any:
    text = str(value)
    if len(text) > _MAX_DECIMAL_CHARS:
        what = f"a Decimal of {len(text)} characters; up to {_MAX_DECIMAL_CHARS} can be saved"
        raise _unsavable(path, what, "Save it as text, str(value).")
    return {"$decimal": text}


def _encode_attributes(tag: str, *names: str) -> Callable[[Any, str], Any]:
    return lambda value, path: {tag: [_encode(getattr(value, name), f"{path}.{name}") for name in names]}


def _encode_time(tag: str) -> Callable[[Any, str], Any]:
    def encoder(value: Any, path: str) -> Any:
        if type(value.tzinfo) not in (type(None), datetime.timezone) or value.fold:
            what = (
                f"{value!r}, which would be restored as another value: a checkpoint has neither the rules of "
                "a time zone, nor which of two equal local times is meant (fold=1)"
            )
            raise _unsavable(path, what, "Save it in UTC: value.astimezone(datetime.timezone.utc).")
        return {tag: value.isoformat()}

    return encoder


def _encode_pure_path(value: pathlib.PurePath, path: str) -> Any:
    return {"$purepath": [_FLAVOURS[type(value)], _checked_text(str(value), path)]}


def _encode_defaultdict(value: Any, path: str) -> Any:
    if value.default_factory is not None:
        what = "a defaultdict, whose default_factory cannot be saved"
        raise _unsavable(path, what, "Save dict(...) of it.")
    return {"$defaultdict": _encode_items(value, path)}


def _encode_members(tag: str) -> Callable[[Any, str], Any]:
    return lambda value, path: {tag: _encode_fields(vars(value), path)}


def _encode_fields(fields: dict[str, Any], path: str) -> dict[str, Any]:
    return {_checked_text(name, path): _encode(item, f"{path}.{name}") for name, item in fields.items()}


def _encode_named_tuple(value: SavedNamedTuple, path: str) -> Any:
    return {
        "$namedtuple": [value.type, [[name, _encode(item, f"{path}.{name}")] for name, item in value.fields]]
    }


def _encode_composite(value: SavedTensor, path: str) -> Any:
    inner = _encode_fields(value.inner, path)
    return {"$composite": [value.type, inner, _encode(value.facts, f"{path}.<description>")]}


_FLAVOURS: dict[type, str] = {pathlib.PurePosixPath: "posix", pathlib.PureWindowsPath: "windows"}

_ENCODERS: dict[type, Callable[[Any, str], Any]] = {
    TensorRef: lambda value, path: {"$tensor": value.name},
    EntryRef: lambda value, path: {"$entry": value.key},
    SavedTensor: _encode_composite,
    SavedEnum: lambda value, path: {"$enum": [value.type, value.name]},
    SavedNamedTuple: _encode_named_tuple,
    SavedDataclass: lambda value, path: {"$dataclass": [value.type, _encode_fields(value.fields, path)]},
    argparse.Namespace: _encode_members("$namespace"),
    types.SimpleNamespace: _encode_members("$simplenamespace"),
    tuple: lambda value, path: {"$tuple": _encode_each(value, path)},
    set: _encode_set("$set"),
    frozenset: _encode_set("$frozenset"),
    bytes: lambda value, path: {"$bytes": base64.b64encode(value).decode()},
    bytearray: lambda value, path: {"$bytearray": base64.b64encode(value).decode()},
    io.BytesIO: _encode_bytesio,
    complex: lambda value, path: {"$complex": [repr(value.real), repr(value.imag)]},
    range: lambda value, path: {"$range": [value.start, value.stop, value.step]},
    slice: _encode_attributes("$slice", "start", "stop", "step"),
    decimal.Decimal: _encode_decimal,
    fractions.Fraction: _encode_attributes("$fraction", "numerator", "denominator"),
    uuid.UUID: lambda value, path: {"$uuid": str(value)},
    collections.defaultdict: _encode_defaultdict,
    collections.OrderedDict: lambda value, path: {"$odict": _encode_items(value, path)},
    collections.Counter: lambda value, path: {"$counter": _encode_items(value, path)},
    collections.deque: lambda value, path: {"$deque": [value.maxlen, _encode_each(value, path)]},
    datetime.datetime: _encode_time("$datetime"),
    datetime.date: lambda value, path: {"$date": value.isoformat()},
    datetime.time: _encode_time("$time"),
    datetime.timedelta: lambda value, path: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    pathlib.PosixPath: lambda value, path: {"$path": _checked_text(str(value), path)},
    pathlib.PurePosixPath: _encode_pure_path,
    pathlib.PureWindowsPath: _encode_pure_path,
}

# The content of a tag may be anything: each decoder checks it.


def _decode_int(body: Any) -> int:
    digits = array_values.read_text(body, _MAX_INT_DIGITS + 1)
    if not _INT.fullmatch(digits):
        raise ValueError(f"expected an integer, found {shown(digits)}")
    return int(digits)


def _decode_float(body: Any) -> float:
    return float(array_values.read_text(body, MAX_NUMBER_CHARS))


def _hashable(items: Iterable[Any]) -> list[Any]:
    """Return the items. Raise if too many have the same hash to make a set of them quickly."""
    found = list(items)
    alike = collections.Counter(map(hash, found))
    if sum(count * count for count in alike.values() if count > 1) > _MAX_CLASHES:
        raise ValueError(f"too many of {len(found)} items have the same hash")
    return found


def _decode_pairs(body: Any) -> list[tuple[Any, Any]]:
    rows = [array_values.read_array(row, 2) for row in array_values.read_array(body)]
    keys = _hashable(_decode(key) for key, _ in rows)
    return [(key, _decode(value)) for key, (_, value) in zip(keys, rows, strict=True)]


def _decode_deque(body: Any) -> Any:
    length, items = array_values.read_array(body, 2)
    if length is not None and not 0 <= array_values.read_integer(length) <= sys.maxsize:
        raise ValueError(f"a deque of length {shown(length)}")
    return collections.deque(map(_decode, array_values.read_array(items)), maxlen=length)


def _decode_bytesio(body: Any) -> io.BytesIO:
    content, position = array_values.read_array(body, 2)
    found = io.BytesIO(array_values.read_bytes(content))
    found.seek(array_values.read_integer(position))
    return found


def _decode_decimal(body: Any) -> decimal.Decimal:
    text = array_values.read_text(body, _MAX_DECIMAL_CHARS)
    found = decimal.Decimal(text)
    if str(found) != text:  # Python also accepts spaces, underscores and other digits
        raise ValueError(f"expected a decimal number, found {shown(text)}")
    return found


def _decode_fraction(body: Any) -> fractions.Fraction:
    numerator, denominator = (
        array_values.read_integer(_decode(part)) for part in array_values.read_array(body, 2)
    )
    if denominator < 1 or math.gcd(numerator, denominator) != 1:
        raise ValueError(f"expected a fraction in lowest terms, found {shown(body)}")
    return fractions.Fraction(numerator, denominator)


def _decode_pure_path(body: Any) -> pathlib.PurePath:
    flavour, text = array_values.read_array(body, 2)
    found = next((kind for kind, name in _FLAVOURS.items() if name == flavour), None)
    if found is None:
        raise ValueError(f"expected the kind of a path, found {shown(flavour)}")
    return found(array_values.read_text(text))


def _decode_uuid(body: Any) -> uuid.UUID:
    text = array_values.read_text(body, 36)
    found = uuid.UUID(text)
    if str(found) != text:
        raise ValueError(f"expected a UUID, found {shown(text)}")
    return found


def _decode_members(body: Any) -> dict[str, Any]:
    return {name: _decode(item) for name, item in array_values.read_object(body).items()}


def _with_members(namespace: Any, body: Any) -> Any:
    vars(namespace).update(_decode_members(body))
    return namespace


def _decode_namedtuple(body: Any) -> SavedNamedTuple:
    kind, rows = array_values.read_array(body, 2)
    pairs = [array_values.read_array(row, 2) for row in array_values.read_array(rows)]
    fields = tuple((array_values.read_text(name), _decode(item)) for name, item in pairs)
    if len({name for name, _ in fields}) != len(fields):
        raise ValueError("a field twice in a named tuple")
    return SavedNamedTuple(array_values.read_text(kind, _MAX_TYPE_CHARS), fields)


def _decode_dataclass(body: Any) -> SavedDataclass:
    kind, members = array_values.read_array(body, 2)
    return SavedDataclass(array_values.read_text(kind, _MAX_TYPE_CHARS), _decode_members(members))


def _decode_composite(body: Any) -> SavedTensor:
    kind, rows, facts = read_composite(body)
    inner = {name: _decode(item) for name, item in rows.items()}
    if not all(isinstance(item, (TensorRef, SavedTensor)) for item in inner.values()):
        raise ValueError("an inner tensor that is not a tensor")
    return check_composite(SavedTensor(kind, inner, _decode(facts)))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tensor": lambda body: TensorRef(array_values.read_text(body)),
    "$int": _decode_int,
    "$float": _decode_float,
    "$tuple": lambda body: tuple(map(_decode, array_values.read_array(body))),
    "$set": lambda body: set(_hashable(map(_decode, array_values.read_array(body)))),
    "$frozenset": lambda body: frozenset(_hashable(map(_decode, array_values.read_array(body)))),
    "$bytes": array_values.read_bytes,
    "$bytearray": lambda body: bytearray(array_values.read_bytes(body)),
    "$bytesio": _decode_bytesio,
    "$complex": lambda body: complex(*map(_decode_float, array_values.read_array(body, 2))),
    "$range": lambda body: range(*map(array_values.read_integer, array_values.read_array(body, 3))),
    "$slice": lambda body: slice(*map(_decode, array_values.read_array(body, 3))),
    "$decimal": _decode_decimal,
    "$uuid": _decode_uuid,
    "$fraction": _decode_fraction,
    "$dict": lambda body: dict(_decode_pairs(body)),
    "$odict": lambda body: collections.OrderedDict(_decode_pairs(body)),
    "$counter": lambda body: collections.Counter(dict(_decode_pairs(body))),
    "$deque": _decode_deque,
    "$datetime": lambda body: datetime.datetime.fromisoformat(array_values.read_text(body, 64)),
    "$date": lambda body: datetime.date.fromisoformat(array_values.read_text(body, 64)),
    "$time": lambda body: datetime.time.fromisoformat(array_values.read_text(body, 64)),
    "$timedelta": lambda body: datetime.timedelta(
        *map(array_values.read_integer, array_values.read_array(body, 3))
    ),
    "$path": lambda body: pathlib.Path(array_values.read_text(body)),
    "$purepath": _decode_pure_path,
    "$ndarray": array_values.decode_ndarray,
    "$npscalar": lambda body: array_values.decode_ndarray(body)[()],
    "$structured": array_values.decode_structured,
    "$npdtype": array_values.decode_dtype,
    "$torch": array_values.decode_torch,
    "$composite": _decode_composite,
    "$entry": lambda body: EntryRef(array_values.read_text(body)),
    "$enum": lambda body: SavedEnum(
        *(array_values.read_text(text, _MAX_TYPE_CHARS) for text in array_values.read_array(body, 2))
    ),
    "$namedtuple": _decode_namedtuple,
    "$dataclass": _decode_dataclass,
    "$defaultdict": lambda body: collections.defaultdict(None, _decode_pairs(body)),
    "$namespace": lambda body: _with_members(argparse.Namespace(), body),
    "$simplenamespace": lambda body: _with_members(types.SimpleNamespace(), body),
}
