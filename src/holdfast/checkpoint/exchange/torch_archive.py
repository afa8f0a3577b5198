"""Zip archives of torch.save: read by ranges, and written as a stream."""

from __future__ import annotations

import io
import itertools
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from holdfast.checkpoint.exchange import safe_unpickler
from holdfast.checkpoint.exchange.safe_unpickler import DTYPE_NAMES, TensorStandIn
from holdfast.checkpoint.exchange.source import read_range
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Shard
from holdfast.errors import Corrupt

_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_LOCAL, _CENTRAL_BYTES = struct.Struct("<4s5H3L2H"), 46
_EXTRA, _ZIP64_ID = struct.Struct("<HH"), 1
_ENCRYPTED, _UTF8 = 0x41, 0x800


def check_layout(archive: zipfile.ZipFile) -> str:
    """Check that every reader finds the same members with the same bytes; return the folder of all."""
    file, members = archive.fp, archive.infolist()
    if file is None or not members:
        raise ValueError("the archive has no members")
    start, num_bytes, count = _directory(file)
    listed = sum(_CENTRAL_BYTES + len(_raw_name(one)) + len(one.extra) + len(one.comment) for one in members)
    if (archive.start_dir, len(members), listed) != (start, count, num_bytes):
        raise ValueError("its directory is not at the position in its end record")
    root = members[0].filename.partition("/")[0] + "/"
    seen: set[str] = set()
    for member in members:
        name = member.filename.lower()
        if name in seen or member.filename != member.orig_filename or not member.filename.startswith(root):
            raise ValueError(f"the name {member.orig_filename[:100]!r} occurs twice, or is ambiguous")
        seen.add(name)
    end = start
    for member in sorted(members, key=lambda one: one.header_offset, reverse=True):
        _check_member(file, member, end)
        end = member.header_offset
    return root


def _directory(file: IO[bytes]) -> tuple[int, int, int]:
    """Return the start, size and number of members of the central directory."""
    at = file.seek(0, io.SEEK_END) - _END.size
    mark, *_, here, count, num_bytes, start, comment_bytes = _read(file, at, _END)
    if mark != b"PK\5\6" or comment_bytes:
        raise ValueError("bytes follow its end record")
    if at >= _LOCATOR.size and (locator := _read(file, at - _LOCATOR.size, _LOCATOR))[0] == b"PK\6\7":
        at -= _LOCATOR.size + _END64.size
        if locator[2] != at:
            raise ValueError("its zip64 record is not before its locator")
        mark, _, *_, here, count, num_bytes, start = _read(file, at, _END64)
        if mark != b"PK\6\6":
            raise ValueError("its zip64 record is damaged")
    if here != count or start + num_bytes != at:
        raise ValueError("bytes are before the archive, or between its directory and its end")
    return start, num_bytes, count


def _check_member(file: IO[bytes], info: zipfile.ZipInfo, end: int) -> None:
    """Check that a member's header matches the directory, and that its bytes are its own."""
    name = info.filename[:100]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"{name!r} is compressed")
    mark, _, flags, method, *_, name_bytes, extra_bytes = _read(file, info.header_offset, _LOCAL)
    found = file.read(name_bytes)
    if (mark, method, found) != (b"PK\3\4", zipfile.ZIP_STORED, _raw_name(info)):
        raise ValueError(f"the header of {name!r} does not match the directory")
    if (flags | info.flag_bits) & _ENCRYPTED or info.volume or not _is_plain_extra(info.extra):
        raise ValueError(f"{name!r} is encrypted, or its size is ambiguous")
    if info.header_offset + _LOCAL.size + name_bytes + extra_bytes + info.file_size > end:
        raise ValueError(f"{name!r} shares bytes with another member")


def _is_plain_extra(extra: bytes) -> bool:
    """Return True if a member's extra data is valid, with at most one zip64 field."""
    at, num_zip64 = 0, 0
    while at + _EXTRA.size <= len(extra):
        kind, num_bytes = _EXTRA.unpack_from(extra, at)
        num_zip64 += kind == _ZIP64_ID
        at += _EXTRA.size + num_bytes
    return at == len(extra) and num_zip64 <= 1


def _raw_name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")


def _read(file: IO[bytes], at: int, layout: struct.Struct) -> tuple[Any, ...]:
    file.seek(max(at, 0))
    return layout.unpack(file.read(layout.size))


ALIGN_BYTES = 64
"""Alignment of storages, so that they can be mapped into memory as tensors."""
_ZIP64_EXTRA_BYTES, _ZIP64_BYTES = 20, 1 << 31
_MAX_AT_ONCE_BYTES = 1 << 16  # smaller archives are read at once: one read instead of ten
_ROOT = "archive"
DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(LookupError, TypeError, ValueError, AttributeError, OverflowError),
)


class TensorLocation(Struct, frozen=True):
    """Position of a tensor's bytes in a file, row-major and without gaps."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def locate_tensor(path: Path, offset: int, length: int) -> TensorLocation | None:
    """Locate the tensor that was saved alone into a range of a file; None if it is not contiguous."""
    what = f"{path} at byte {offset}"
    try:
        is_small = length <= _MAX_AT_ONCE_BYTES
        whole = io.BytesIO(read_range(path, offset, length)) if is_small else None
        with zipfile.ZipFile(whole or io.BufferedReader(_FileRange(path, offset, length))) as archive:
            return _find(archive, path, offset, what)
    except DAMAGED as error:
        raise Corrupt(
            f"{what} ({length} bytes) is not an archive of torch.save: {error}. It is damaged.", key=str(path)
        ) from error


def _find(archive: zipfile.ZipFile, path: Path, offset: int, what: str) -> TensorLocation | None:
    root = check_layout(archive)
    members = {info.filename: info for info in archive.infolist()}
    order = f"{root}byteorder"
    if order in members and archive.read(order) != b"little":
        return None
    data = archive.read(f"{root}data.pkl")
    tensor = safe_unpickler.load(data, safe_unpickler.TENSOR_NAMES, what, storage=tuple)
    if not isinstance(tensor, TensorStandIn):
        return None
    storage, first, size, stride, *rest = tensor.args
    if not all(type(number) is int and number >= 0 for number in (first, *size, *stride)):
        raise ValueError(f"a tensor of size {size} and strides {stride} at {first} is invalid")
    dtype = DTYPE_NAMES.get(rest[2] if storage[1] == "untyped" else storage[1])
    if dtype is None or not _is_contiguous(size, stride):
        return None
    info = members[f"{root}data/{storage[2]}"]
    end = (first + math.prod(size)) * ITEM_BYTES[dtype]
    if info.compress_type != zipfile.ZIP_STORED or end > info.file_size:
        raise ValueError(f"its storage has {info.file_size} bytes, the tensor needs {end}")
    start = offset + info.header_offset
    *_, name_bytes, extra_bytes = _LOCAL.unpack(read_range(path, start, _LOCAL.size))
    start += _LOCAL.size + name_bytes + extra_bytes
    return TensorLocation(dtype, tuple(size), start + first * ITEM_BYTES[dtype])


def _is_contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected and 0 not in size:
            return False
        expected *= length
    return True


class _FileRange(io.RawIOBase):
    """Range of a file, as a file object."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._path, self._offset, self._length = path, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        num_bytes = max(0, min(len(view), self._length - self._at))
        view[:num_bytes] = read_range(self._path, self._offset + self._at, num_bytes)
        self._at += num_bytes
        return num_bytes


class Record(Struct, frozen=True):
    """Record of an archive: its name, its size, and a function that yields its bytes."""

    name: str
    num_bytes: int
    read: Callable[[], Iterable[bytes | memoryview]]

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Record:
        """Return a record of some bytes."""
        return cls(name, len(data), lambda: (data,))


def write_archive(
    out: IO[bytes], tree: Any, stored: Iterable[Shard], read: Callable[[Shard], Iterator[memoryview]]
) -> int:
    """Write a tree with a whole `Shard` in place of each tensor, as `torch.save` does; return the bytes.

    `stored` has each storage once, by the name of its record, in the order of the archive; `read` yields its
    bytes.
    """
    data = io.BytesIO()
    _Pickler(data, protocol=2).dump(tree)  # the protocol of torch.save, which torch.load expects
    storages = (Record(f"data/{one.name}", one.num_bytes, partial(read, one)) for one in stored)
    return write_records(out, data.getvalue(), storages)


def write_records(out: IO[bytes], pickled: bytes, storages: Iterable[Record]) -> int:
    """Write a pickle as `torch.save` does, and its storages, at the end of a file; return the bytes.

    Each storage is written before the next one is asked for.
    """
    view = _ArchiveFile(out)
    first = Record.of_bytes("data.pkl", pickled), Record.of_bytes("byteorder", b"little")
    with zipfile.ZipFile(view, "w", zipfile.ZIP_STORED) as archive:
        for source in itertools.chain(first, storages, [Record.of_bytes("version", b"3\n")]):
            info = _info(view, source.name, source.num_bytes)
            with archive.open(info, "w", force_zip64=source.num_bytes >= _ZIP64_BYTES) as record:
                for part in source.read():
                    record.write(part)
    return view.seek(0, 2)


def _info(view: _ArchiveFile, name: str, num_bytes: int) -> zipfile.ZipInfo:
    """Return a member whose data is aligned by an extra field that readers ignore."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    info.file_size = num_bytes
    zip64 = _ZIP64_EXTRA_BYTES if num_bytes >= _ZIP64_BYTES else 0
    end = view.tell() + _LOCAL.size + len(info.filename) + zip64 + 4
    padding = -end % ALIGN_BYTES
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    return info


class _ArchiveFile(io.RawIOBase):
    """Rest of an open file, as a file object: offsets in an archive count from its start."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._base = out.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._out.seek(offset + (0 if whence else self._base), whence) - self._base

    def write(self, data: Any, /) -> int:
        return self._out.write(data)

    def flush(self) -> None:
        self._out.flush()


class _Storage(Struct, frozen=True):
    """Storage of a tensor, with the reference to it in a pickle."""

    reference: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """Pickler that writes a `Shard` as torch.save writes a tensor."""

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, Shard):
            return NotImplemented
        import torch  # imported here, because only writing needs torch
        from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

        from holdfast.checkpoint.state.tensors import torch_dtype

        dtype = torch_dtype(obj.dtype)
        name = torch.storage._dtype_to_storage_type_map().get(dtype)
        kind = torch.UntypedStorage if name is None else getattr(torch, name)
        count = obj.num_bytes if name is None else math.prod(obj.shape)
        storage = _Storage(("storage", kind, obj.name, "cpu", count))
        stride = torch.empty(obj.shape, device="meta").stride()
        arguments = (storage, 0, obj.shape, stride, False, OrderedDict())
        return (_rebuild_tensor_v3, (*arguments, dtype)) if name is None else (_rebuild_tensor_v2, arguments)

    def persistent_id(self, obj: Any, /) -> Any:
        return obj.reference if isinstance(obj, _Storage) else None
