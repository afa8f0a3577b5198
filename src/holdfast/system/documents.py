"""JSON from outside: decoded within limits, and its members read with their types checked; pure."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, NoReturn, TypeVar, overload

from msgspec import Meta, ValidationError, convert, to_builtins

from holdfast.errors import Corrupt, InvalidInput

MAX_BYTES = 1 << 20  # bytes of a document whose kind has no limit of its own
MAX_DEPTH = 64  # arrays and objects that may be nested in each other
MAX_DIGITS = 20  # digits of an integer; 2**64 has 20
MAX_NUMBER_CHARS = 64  # characters of a number with a fraction or exponent; Python writes 24
MAX_COUNT = 2**53 - 1
"""Greatest count, size and offset: the greatest integer that every JSON reader keeps exactly."""
MAX_TEXT_CHARS = 1 << 16  # characters of a text whose member has no limit of its own

_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_INTEGER = b"0" * (MAX_DIGITS + 1)  # once all digits are zeros
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_NUMBER = 1.7e308
_T = TypeVar("_T")
Text = bytes | bytearray | memoryview | str
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")


def decode(
    text: Text, what: str, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH, any_text: bool = False
) -> Any:
    """Return the value of a JSON text.

    Every text in it is valid Unicode, every number is finite, and no key is in an object twice. With
    `any_text` lone surrogates are allowed, by which Python writes file names that are not UTF-8.
    """
    if len(text) > max_bytes:
        raise Corrupt(
            f"{what} is not read: it has {len(text)} bytes; at most {max_bytes} are allowed.", key=what
        )
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
        bare = _STRING.sub(b"", data)
        _check_depth(bare, max_depth)
        # A regular expression takes ten times as long.
        has_long_integer = _LONG_INTEGER in bare.translate(_DIGITS_AS_ZEROS)
        value = (_SLOW if has_long_integer else _FAST).decode(data.decode())
        if not any_text and _ESCAPED_SURROGATE.search(data):
            _check_texts(value)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"[:200]
        raise Corrupt(f"{what} is not valid JSON: {reason}.", key=what) from error
    return value


def _check_depth(bare: bytes, max_depth: int) -> None:
    brackets = bare.translate(None, _NO_BRACKETS)
    left = brackets
    for _ in range(max_depth // 2):  # each turn removes at most two levels
        if not left:
            return
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    depth = 0
    for bracket in brackets if left else b"":
        depth += 1 if bracket in b"[{" else -1
        if depth > max_depth:
            raise ValueError(f"it is nested more than {max_depth} deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} is in an object twice")
    return members


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise ValueError(f"it holds an integer of {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)


def _number(digits: str) -> float:
    if len(digits) > MAX_NUMBER_CHARS:
        raise ValueError(
            f"it holds a number of {len(digits)} characters; at most {MAX_NUMBER_CHARS} are allowed"
        )
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it holds the number {digits}, which is not finite")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not JSON")


_FAST = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_constant)
_SLOW = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_constant=_constant, parse_int=_integer
)


def _check_texts(value: Any) -> None:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            if not item.isascii():
                item.encode()
        elif isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item
            left += item.values()


def is_text(text: str) -> bool:
    """Return False for a string with lone surrogates. File names in other encodings have these."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """Return a value in a few words, however large, deep or strange it is."""
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:60]!r}... ({len(value)} characters)"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)} items"
    if isinstance(value, dict):
        return f"an object of {len(value)} members"
    return f"a {type(value).__name__}"


@overload
def decode_as(kind: type[_T], text: Text, what: str, **limits: Any) -> _T: ...


@overload
def decode_as(kind: Any, text: Text, what: str, **limits: Any) -> Any: ...


def decode_as(kind: Any, text: Text, what: str, **limits: Any) -> Any:
    """Return a JSON text as a value of a type; `limits` are the other arguments of `decode`."""
    return read_as(kind, decode(text, what, **limits), what)


@overload
def read_as(kind: type[_T], value: Any, what: str) -> _T: ...


@overload
def read_as(kind: Any, value: Any, what: str) -> Any: ...


def read_as(kind: Any, value: Any, what: str) -> Any:
    """Return a value of JSON as a type, whose annotations may have limits by `msgspec.Meta`.

    Arrays become tuples, lists and sets, texts enums by value, and objects mappings and structs.
    """
    try:
        return convert(value, kind, str_keys=True)
    except (ValidationError, UnicodeEncodeError) as error:  # a check of a class, or `any_text`
        raise Corrupt(f"{what}: {str(error).rstrip('.')}.", key=what) from error


def to_plain(value: Any) -> Any:
    """Return a struct as a value of JSON. Subclasses of plain types, such as NumPy's, become plain."""
    return to_builtins(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"A {type(value).__name__} is no value of JSON.")


Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # A count, size, offset or number of something


def decode_text(data: bytes, name: str) -> str:
    """Return the text of a user's file, without a byte order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        line = 1 if is_wide else data.count(b"\n", 0, error.start) + 1
        found = "UTF-16" if is_wide else f"the byte 0x{data[error.start]:02x}, as in Latin-1 or Windows-1252"
        raise InvalidInput(f"{name}:{line}: expected UTF-8, found {found}. Save it as UTF-8.") from None
