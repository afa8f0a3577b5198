"""Files that other libraries have saved, checked for damage before anything is loaded from them.

They have no hashes. The archives of torch.save have a checksum per member, and a safetensors file has its
length in its header, so files that were cut off or not written at all are found.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 100 << 20


def file_fault(path: Path) -> str | None:
    """Return the damage of a file; None if none is found, or if the kind of file cannot be checked."""
    if path.suffix == ".safetensors":
        return _safetensors_fault(path)
    if path.name.endswith(".index.json"):
        return _index_fault(path)
    if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
        return _archive_fault(path)
    if path.is_dir() and path.name.endswith("_0") and not (path / ".metadata").exists():
        return f"{path.name}/.metadata is missing"
    return None


def folder_fault(folder: Path) -> str | None:
    """Return the damage of the first damaged file below a folder; None if none is found."""
    return next((fault for path in sorted(folder.rglob("*")) if (fault := file_fault(path))), None)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _archive_fault(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        return f"{path.name} is damaged: {error}"
    return None if damaged is None else f"{path.name} is damaged at {damaged}"


def _safetensors_fault(path: Path) -> str | None:
    found = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path.name} is damaged: {error}"
    return None if found == expected else f"{path.name} has {found} bytes, and should have {expected}"


def _index_fault(path: Path) -> str | None:
    index = read_json(path)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        return f"{path.name} is damaged"
    missing = sorted({str(name) for name in shards.values() if not (path.parent / str(name)).exists()})
    return f"{missing[0]} is missing" if missing else None
