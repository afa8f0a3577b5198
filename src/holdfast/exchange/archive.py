"""The zip archives of torch.save, read by ranges and written as a stream."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holdfast.errors import Corrupt
from holdfast.exchange import allowlist
from holdfast.exchange.allowlist import DTYPE_NAMES, Strided
from holdfast.exchange.offer import read_range
from holdfast.exchange.zip_layout import check_layout
from holdfast.format.dtypes import ITEM_BYTES

ALIGN_BYTES = 64
"""Storages begin at a multiple of this, so that they can be mapped into memory as tensors."""
_LOCAL_HEADER_BYTES, _ZIP64_EXTRA_BYTES, _ZIP64_BYTES = 30, 20, 1 << 31
_MAX_AT_ONCE_BYTES = 1 << 16  # a smaller archive is read whole: one read instead of ten
_ROOT = "archive"
DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(LookupError, TypeError, ValueError, AttributeError, OverflowError),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of one tensor lie in a file, row-major and without gaps."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def find_tensor(path: Path, offset: int, length: int) -> Place | None:
    """Where the tensor lies that was saved alone into a range of a file.

    Returns:
        The place; None if the tensor is not plain: not contiguous, of another byte order, or a subclass.

    Raises:
        Unsupported: the pickle needs something that is not on the list; nothing of it was run.
        Corrupt: the range holds no archive, or a damaged one.
        NotFound: there is no such file.
    """
    what = f"{path} at byte {offset}"
    try:
        with zipfile.ZipFile(_opened(path, offset, length)) as archive:
            return _find(archive, path, offset, what)
    except DAMAGED as error:
        message = f"{what} ({length} bytes) holds no archive of torch.save: {error}. It is damaged."
        raise Corrupt(message, key=str(path)) from error


def _find(archive: zipfile.ZipFile, path: Path, offset: int, what: str) -> Place | None:
    root = check_layout(archive)
    members = {info.filename: info for info in archive.infolist()}
    order = f"{root}byteorder"
    if order in members and archive.read(order) != b"little":
        return None
    tensor = allowlist.load(archive.read(f"{root}data.pkl"), allowlist.TENSOR_NAMES, what, storage=tuple)
    if not isinstance(tensor, Strided):
        return None
    storage, first, size, stride, *rest = tensor.row
    if not all(type(number) is int and number >= 0 for number in (first, *size, *stride)):
        message = f"a tensor of size {size} and strides {stride} at {first} cannot be"
        raise ValueError(message)
    dtype = DTYPE_NAMES.get(rest[2] if storage[1] == "untyped" else storage[1])
    if dtype is None or not _is_contiguous(size, stride):
        return None
    info = members[f"{root}data/{storage[2]}"]
    end = (first + math.prod(size)) * ITEM_BYTES[dtype]
    if info.compress_type != zipfile.ZIP_STORED or end > info.file_size:
        message = f"its storage has {info.file_size} bytes, the tensor needs {end}"
        raise ValueError(message)
    head = bytes(read_range(path, offset + info.header_offset, _LOCAL_HEADER_BYTES))
    skip = sum(struct.unpack_from("<HH", head, 26))  # length of the name and of what comes after it
    start = offset + info.header_offset + _LOCAL_HEADER_BYTES + skip
    return Place(dtype, tuple(size), start + first * ITEM_BYTES[dtype])


def _is_contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected and 0 not in size:
            return False
        expected *= length
    return True


def _opened(path: Path, offset: int, length: int) -> IO[bytes]:
    if length <= _MAX_AT_ONCE_BYTES:
        return io.BytesIO(read_range(path, offset, length))
    return io.BufferedReader(_Window(path, offset, length))


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._path = path
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        num_bytes = max(0, min(len(view), self._length - self._at))
        view[:num_bytes] = read_range(self._path, self._offset + self._at, num_bytes)
        self._at += num_bytes
        return num_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Stands, in a tree that is to be pickled, for a tensor whose bytes are a record of the archive."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_archive(
    out: IO[bytes], tree: Any, stored: Iterable[Stored], take: Callable[[Stored], Iterator[memoryview]]
) -> int:
    """Write what `torch.save` would write of a tree, at the end of a file.

    Args:
        out: an open file that can seek, at the place where the archive begins.
        tree: plain containers and values, with `Stored` in place of tensors.
        stored: each storage once, in the order in which their bytes are written.
        take: gives a storage's bytes.

    Returns:
        Bytes of the archive.
    """
    view = _Tail(out)
    with zipfile.ZipFile(view, "w", zipfile.ZIP_STORED) as archive:
        _write(archive, view, "data.pkl", _pickle(tree))
        _write(archive, view, "byteorder", b"little")
        for one in stored:
            info = _info(view, f"data/{one.key}", one.num_bytes)
            with archive.open(info, "w", force_zip64=one.num_bytes >= _ZIP64_BYTES) as record:
                for part in take(one):
                    record.write(part)
        _write(archive, view, "version", b"3\n")
    return view.seek(0, 2)


def _write(archive: zipfile.ZipFile, view: _Tail, name: str, data: bytes) -> None:
    archive.writestr(_info(view, name, len(data)), data)


def _info(view: _Tail, name: str, num_bytes: int) -> zipfile.ZipInfo:
    """A member whose data will be aligned, by an extra field that readers pass over."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    info.file_size = num_bytes
    zip64 = _ZIP64_EXTRA_BYTES if num_bytes >= _ZIP64_BYTES else 0
    end = view.tell() + _LOCAL_HEADER_BYTES + len(info.filename) + zip64 + 4
    padding = -end % ALIGN_BYTES
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return info


class _Tail(io.RawIOBase):
    """The rest of an open file as a file of its own, since offsets in an archive count from its start."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._base = out.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._out.tell() - self._base

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._out.seek(offset + (0 if whence else self._base), whence) - self._base

    def write(self, data: Any, /) -> int:
        return self._out.write(data)

    def flush(self) -> None:
        self._out.flush()


def _pickle(tree: Any) -> bytes:
    data = io.BytesIO()
    _Pickler(data, protocol=2).dump(tree)  # what torch.save uses, and torch.load expects
    return data.getvalue()


@dataclass(frozen=True, slots=True)
class _Storage:
    stored: Stored


class _Pickler(pickle.Pickler):
    """Pickles `Stored` as torch.save pickles a tensor."""

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, Stored):
            return NotImplemented
        import torch  # not above: only those who write need it
        from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

        from holdfast.state.tensors import torch_dtype

        stride, step = [], 1
        for size in reversed(obj.shape):
            stride.append(step)
            step *= max(size, 1)
        facts = (_Storage(obj), 0, obj.shape, tuple(reversed(stride)), False, OrderedDict())
        dtype = torch_dtype(obj.dtype)
        if dtype in torch.storage._dtype_to_storage_type_map():
            return _rebuild_tensor_v2, facts
        return _rebuild_tensor_v3, (*facts, dtype)

    def persistent_id(self, obj: Any, /) -> Any:
        if not isinstance(obj, _Storage):
            return None
        import torch

        from holdfast.state.tensors import torch_dtype

        stored = obj.stored
        dtype = torch_dtype(stored.dtype)
        name = torch.storage._dtype_to_storage_type_map().get(dtype)
        kind = torch.UntypedStorage if name is None else getattr(torch, name)
        count = stored.num_bytes if name is None else math.prod(stored.shape)
        return ("storage", kind, stored.key, "cpu", count)
