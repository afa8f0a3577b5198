"""Values of numpy and torch that are not tensors, as bodies of tags; neither is imported to encode."""

from __future__ import annotations

import base64
import importlib
import math
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta, convert

from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES, Sizes
from holdfast.errors import InvalidInput, Unsupported
from holdfast.system.documents import MAX_TEXT_CHARS, shown


def read_text(body: Any, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Return a body that is a text of limited length."""
    if type(body) is not str or len(body) > max_chars:
        raise ValueError(f"expected a text of at most {max_chars} characters, found {shown(body)}")
    return body


def read_array(body: Any, count: int | None = None) -> list[Any]:
    """Return a body that is an array, of `count` items if given."""
    if type(body) is not list or count not in (None, len(body)):
        raise ValueError(f"expected an array{'' if count is None else f' of {count}'}, found {shown(body)}")
    return body


def read_object(body: Any) -> dict[str, Any]:
    """Return a body that is an object."""
    if type(body) is not dict:
        raise ValueError(f"expected an object, found {shown(body)}")
    return body


def read_integer(body: Any) -> int:
    """Return a body that is an integer."""
    if type(body) is not int:
        raise ValueError(f"expected an integer, found {shown(body)}")
    return body


def read_bytes(body: Any) -> bytes:
    """Return the bytes that a body has as base64."""
    return base64.b64decode(read_text(body, MAX_DOCUMENT_BYTES), validate=True)


_DTYPE = re.compile(r"[<>|=]?[biufcmMSUV][0-9]{0,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")
_TorchSizes = tuple[Annotated[int, Meta(ge=1 - 2**63, le=2**63 - 1)], ...]
_MAX_EMPTY_ITEMS = 1 << 16
_MAX_FIELDS = 4096
_MAX_FIELD_DEPTH = 16
_MAX_ITEM_BYTES = 1 << 30


def encoder_of(value: Any) -> Callable[[Any, str], Any] | None:
    """Return the encoder for a numpy or torch value. Checks only modules that are already imported."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    # Exactly ndarray: its subclasses (masked arrays, matrices) mean more than their numbers.
    if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return encode_numpy
    if numpy is not None and isinstance(value, numpy.dtype):
        return _encode_dtype
    if torch is not None and isinstance(value, (torch.Size, *_kinds_of(torch).values())):
        return _encode_torch
    return None


def encode_numpy(value: Any, path: str) -> Any:
    """Encode an array or a scalar of numpy."""
    numpy = importlib.import_module("numpy")
    kind = value.dtype
    if kind.names is not None and not kind.hasobject:
        shape = list(value.shape) if type(value) is numpy.ndarray else None
        filled = numpy.zeros(value.shape, kind)  # bytes between the fields are zeros
        filled[...] = value
        data = base64.b64encode(filled.tobytes()).decode()
        return {"$structured": [_encode_fields(kind, path), shape, data]}
    _check_plain(kind, path)
    tag = "$ndarray" if value.shape or type(value).__name__ == "ndarray" else "$npscalar"
    data = base64.b64encode(value.tobytes()).decode()
    return {tag: [kind.str, list(value.shape), data]}


def _check_plain(kind: Any, path: str) -> None:
    numpy = importlib.import_module("numpy")
    # An extension dtype such as bfloat16 has the str "<V2", and would be restored as two opaque bytes.
    if kind.hasobject or kind.names or kind != numpy.dtype(kind.str):
        raise InvalidInput(
            f"{path} has the numpy dtype {kind}, which cannot be saved: only numbers, booleans, dates, bytes "
            f"and text of a fixed length can. Nothing was written. {_advice_on_dtype(kind)}",
            key=path,
        )


def _advice_on_dtype(kind: Any) -> str:
    if kind.names or kind.kind == "V":
        return "Save a view of it with a dtype of numpy's own, and the name of this dtype."
    if kind.char == "T":
        return 'Save its astype("U").'
    if kind.hasobject:
        return "Save its tolist(), whose items are saved one by one, and make the array of them again."
    return "Save a view or an astype() of it."


def _encode_dtype(value: Any, path: str) -> Any:
    """Encode a dtype of numpy, which may have fields."""
    if value.names is not None and not value.hasobject:
        return {"$npdtype": _encode_fields(value, path)}
    _check_plain(value, path)
    return {"$npdtype": value.str}


def decode_dtype(body: Any) -> Any:
    """Return the dtype of a `$npdtype`."""
    if type(body) is dict:
        return _decode_fields(body, _MAX_FIELD_DEPTH)
    return importlib.import_module("numpy").dtype(_plain_name(body))


def _encode_fields(kind: Any, path: str) -> Any:
    """Return the members of a structured dtype: the size of an item, and a row for each field."""
    numpy = importlib.import_module("numpy")
    if kind.type is not numpy.void or any(len(field) > 2 for field in kind.fields.values()):
        raise InvalidInput(
            f"{path} has the numpy dtype {kind}. Records and fields with titles cannot be saved. Nothing was "
            "written. Save a structured array of plain fields: value.view([(name, dtype), ...]).",
            key=path,
        )
    rows = []
    for name in kind.names:
        inner, offset = kind.fields[name]
        element, shape = inner.subdtype or (inner, ())
        if element.names is None:
            _check_plain(element, f"{path}[{name!r}]")
            format_ = element.str
        else:
            format_ = _encode_fields(element, f"{path}[{name!r}]")
        rows.append([name, format_, offset, list(shape)])
    return {"itemsize": kind.itemsize, "fields": rows}


def decode_ndarray(body: Any) -> Any:
    """Return the array of a `$ndarray` or `$npscalar`."""
    numpy = importlib.import_module("numpy")
    name, sizes, text = read_array(body, 3)
    return _array_of(numpy.dtype(_plain_name(name)), sizes, text)


def decode_structured(body: Any) -> Any:
    """Return the array, or without a shape the scalar, of a `$structured`."""
    fields, sizes, text = read_array(body, 3)
    dtype = _decode_fields(fields, _MAX_FIELD_DEPTH)
    if sizes is None:
        return _array_of(dtype, [], text)[()]
    return _array_of(dtype, sizes, text)


def _plain_name(name: Any) -> str:
    if not _DTYPE.fullmatch(read_text(name, 32)):
        raise ValueError(f"expected a plain numpy dtype, found {shown(name)}")
    return name


def _decode_fields(body: Any, depth: int) -> Any:
    numpy = importlib.import_module("numpy")
    members = read_object(body)
    rows = read_array(members.get("fields"))
    if members.keys() != {"itemsize", "fields"} or len(rows) > _MAX_FIELDS or not depth:
        raise ValueError(f"expected a structured numpy dtype, found {shown(body)}")
    names, formats, offsets = [], [], []
    item_bytes = read_integer(members["itemsize"])
    for row in rows:
        name, format_, offset, sizes = read_array(row, 4)
        shape = convert(sizes, Sizes)
        if type(format_) is dict:
            element = _decode_fields(format_, depth - 1)
        else:
            element = numpy.dtype(_plain_name(format_))
        if not 0 <= read_integer(offset) <= item_bytes <= _MAX_ITEM_BYTES:
            raise ValueError(f"a field at {offset} of {item_bytes} bytes")
        if max(element.itemsize, 1) * math.prod(shape) > _MAX_ITEM_BYTES:
            raise ValueError(f"a field of shape {shown(sizes)}")
        names.append(read_text(name))
        formats.append((element, shape) if shape else element)
        offsets.append(offset)
    return numpy.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": item_bytes})


def _array_of(dtype: Any, sizes: Any, text: Any) -> Any:
    numpy = importlib.import_module("numpy")
    shape, data = convert(sizes, Sizes), read_bytes(text)
    num_items = math.prod(shape)
    if dtype.itemsize and num_items:
        if dtype.itemsize * num_items != len(data):
            raise ValueError(f"an array {dtype}{list(shape)} of {len(data)} bytes")
        return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()
    if num_items > _MAX_EMPTY_ITEMS:  # items without bytes, for which numpy takes memory
        raise ValueError(f"an array of {num_items} items without bytes")
    return numpy.zeros(shape, dtype)  # frombuffer takes neither


def _encode_torch(value: Any, path: str) -> Any:
    if type(value).__name__ == "Size":
        return {"$torch": ["size", list(value)]}
    return {"$torch": [type(value).__name__, str(value).removeprefix("torch.")]}


def decode_torch(body: Any) -> Any:
    """Return the size, device, dtype, layout or memory format of a `$torch`."""
    torch = importlib.import_module("torch")
    kind, value = read_array(body, 2)
    if kind == "size":
        return torch.Size(convert(value, _TorchSizes))
    if kind == "device":
        try:
            return torch.device(read_text(value, 64))
        except RuntimeError as error:
            raise ValueError(f"no device of torch is called {shown(value)}") from error
    expected = _kinds_of(torch).get(kind) if type(kind) is str else None
    found = vars(torch).get(read_text(value, 64)) if expected is not None else None  # not getattr: may import
    if expected is None or not isinstance(found, expected):
        raise Unsupported(
            f"Unknown torch {shown(kind)} {shown(value)} in a checkpoint: torch {torch.__version__} does not "
            "have it. Install a newer torch, or a newer Holdfast, to read it."
        )
    return found


def _kinds_of(torch: Any) -> dict[str, type]:
    """Return the types of torch's named values, by the name of the type."""
    return {kind.__name__: kind for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format)}
