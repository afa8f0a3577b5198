"""Files that other libraries have saved, checked for damage before anything is loaded from them.

They have no hashes. The archives of torch.save have a checksum per member, and a safetensors file has its
length in its header, so files that were cut off or not written at all are found.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert

from holdfast.errors import Denied, HoldfastError, RetryLater
from holdfast.system.linux.files import NOT_A_FILE, open_regular

_T = TypeVar("_T")
_MAX_HEADER_BYTES = 100 << 20
_MAX_JSON_BYTES = 64 << 20  # the state of a long training logs many lines


def file_fault(path: Path) -> str | None:
    """Return the damage of a file; None if none is found, or if the kind of file cannot be checked."""
    try:
        if path.suffix == ".safetensors":
            return _safetensors_fault(path)
        if path.name.endswith(".index.json"):
            return _index_fault(path)
        if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
            return _archive_fault(path)
        if path.is_dir() and path.name.endswith("_0") and not (path / ".metadata").exists():
            return f"{path.name}/.metadata is missing"
    except OSError as error:
        if error.errno in NOT_A_FILE:
            return f"{path.name} is damaged: {error.strerror}"
        raise _unreadable(path, error) from error
    return None


def folder_fault(folder: Path) -> str | None:
    """Return the damage of the first damaged file below a folder; None if none is found."""
    return next((fault for path in sorted(folder.rglob("*")) if (fault := file_fault(path))), None)


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Return the content of a JSON file as a type; None if it is missing, damaged or of another type."""
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_JSON_BYTES + 1)
        return convert(json.loads(text), kind) if len(text) <= _MAX_JSON_BYTES else None
    except (ValueError, RecursionError, ValidationError):
        return None
    except OSError as error:
        if error.errno in NOT_A_FILE:
            return None
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> HoldfastError:
    kind = Denied if isinstance(error, PermissionError) else RetryLater
    return kind(f"{path} could not be read: {error.strerror}. It may be intact. Nothing was loaded.")


def _archive_fault(path: Path) -> str | None:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            damaged = _excess(archive, os.fstat(file.fileno()).st_size) or archive.testzip()
    except (EOFError, ValueError, RuntimeError, zipfile.BadZipFile, struct.error) as error:
        return f"{path.name} is damaged: {error}"
    return None if damaged is None else f"{path.name} is damaged at {damaged}"


def _excess(archive: zipfile.ZipFile, num_bytes: int) -> str | None:
    """Return the first member beyond the length of the file. Torch compresses nothing."""
    for member in archive.infolist():
        num_bytes -= member.file_size
        if num_bytes < 0 or member.compress_type != zipfile.ZIP_STORED:
            return member.filename
    return None


def _safetensors_fault(path: Path) -> str | None:
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{path.name} is damaged: {error}"
    return None if found == expected else f"{path.name} has {found} bytes, and should have {expected}"


class _Index(Struct):
    weight_map: dict[Any, Any]


def _index_fault(path: Path) -> str | None:
    index = read_json(path, _Index)
    if index is None:
        return f"{path.name} is damaged"
    names = {str(name) for name in index.weight_map.values()}
    missing = sorted(name for name in names if not os.path.exists(path.parent / name))  # noqa: PTH110 - any name
    return f"{missing[0]} is missing" if missing else None
