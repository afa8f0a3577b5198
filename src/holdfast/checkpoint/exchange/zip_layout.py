"""Check that all readers of a zip archive find the same members in it.

Python checks an archive and torch loads it, so both must read it alike. Both read the central directory,
but they differ where an archive is unusual: in names that occur twice or differ by case, bytes before the
archive, comments, and misplaced records of zip64. torch.save writes none of these, so an archive with any
of them is refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import IO, Any

_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_LOCAL, _CENTRAL_BYTES = struct.Struct("<4s5H3L2H"), 46
_EXTRA, _ZIP64_ID = struct.Struct("<HH"), 1
_ENCRYPTED, _UTF8 = 0x41, 0x800


def check_layout(archive: zipfile.ZipFile) -> str:
    """Check that every reader finds the same members with the same bytes in an archive.

    Returns:
        The folder of all members.

    Raises:
        ValueError: a member is compressed, or the archive is ambiguous.
    """
    file, members = archive.fp, archive.infolist()
    if file is None or not members:
        raise ValueError("the archive has no members")
    start, num_bytes, count = _directory(file)
    listed = sum(_CENTRAL_BYTES + len(_raw_name(one)) + len(one.extra) + len(one.comment) for one in members)
    if (archive.start_dir, len(members), listed) != (start, count, num_bytes):
        raise ValueError("its directory is not at the position in its end record")
    root = members[0].filename.partition("/")[0] + "/"
    seen: set[str] = set()
    for one in members:
        name = one.filename.lower()
        if name in seen or one.filename != one.orig_filename or not one.filename.startswith(root):
            raise ValueError(f"the name {one.orig_filename[:100]!r} occurs twice, or is ambiguous")
        seen.add(name)
    end = start
    for one in sorted(members, key=lambda one: one.header_offset, reverse=True):
        _check_member(file, one, end)
        end = one.header_offset
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
