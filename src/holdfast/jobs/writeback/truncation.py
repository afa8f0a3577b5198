"""Detection of truncated files by their own format, as a killed writer leaves them."""

from __future__ import annotations

import os
import struct
from pathlib import PurePosixPath

from holdfast.errors import Corrupt
from holdfast.system.documents import decode_object

_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_END_BYTES, _ZIP_TAIL_BYTES = 22, 22 + 0xFFFF
_NEVER_EMPTY = (".pt", ".pth", ".npz", ".zip", ".safetensors")
_MAX_HEADER_BYTES = 100 << 20  # of a safetensors file, as its own library limits it


def truncation_reason(fd: int, name: str) -> str:
    """Return why a file is incomplete. Empty if its format does not show it.

    Recognizes zip archives, which `torch.save` and `numpy.savez` write with the directory last, and
    safetensors files, whose header contains their length.

    Args:
        fd: the file, open for reading.
        name: its name, by which safetensors files are recognized.
    """
    num_bytes, suffix = os.fstat(fd).st_size, PurePosixPath(name).suffix
    if not num_bytes:
        return "it is empty" if suffix in _NEVER_EMPTY else ""
    if suffix == ".safetensors":
        return _safetensors_truncation(fd, num_bytes)
    if os.pread(fd, 4, 0) == _ZIP:
        return _zip_truncation(fd, num_bytes)
    return ""


def _zip_truncation(fd: int, num_bytes: int) -> str:
    start = max(0, num_bytes - _ZIP_TAIL_BYTES)
    tail = os.pread(fd, num_bytes - start, start)
    at = tail.rfind(_ZIP_END)
    while at >= 0:
        if at + _ZIP_END_BYTES <= len(tail):
            (comment_bytes,) = struct.unpack_from("<H", tail, at + 20)
            if at + _ZIP_END_BYTES + comment_bytes == len(tail):
                return ""
        at = tail.rfind(_ZIP_END, 0, at)
    return "it starts as a zip archive (as written by torch.save), but the directory at its end is missing"


def _safetensors_truncation(fd: int, num_bytes: int) -> str:
    head = os.pread(fd, 8, 0)
    if len(head) < 8:
        return "it is too short for a safetensors file"
    (header_bytes,) = struct.unpack("<Q", head)
    if header_bytes > _MAX_HEADER_BYTES:
        return ""  # not a safetensors file despite its name
    try:
        text = os.pread(fd, min(header_bytes, num_bytes), 8)
        header = decode_object(text, "the header", max_bytes=_MAX_HEADER_BYTES)
        ends = [
            header.fields(key).integers("data_offsets")[-1] for key in header.members if key != "__metadata__"
        ]
        wanted = 8 + header_bytes + max(ends, default=0)
    except (Corrupt, IndexError):
        return "the header of a safetensors file is missing or truncated"
    if num_bytes < wanted:
        return f"its header specifies {wanted} bytes, but only {num_bytes} exist"
    return ""
