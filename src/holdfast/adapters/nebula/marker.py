"""Marker files at paths where a framework expects a checkpoint. Each refers to a Holdfast checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.system.documents import decode_dataclass

_FIRST_LINE = "This is no file of torch.save: the state is in a Holdfast checkpoint.\n"
_LIMIT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class PartitionMarker:
    """Reference to a partition of a checkpoint, in a file."""

    home: str
    tag: str
    partition: str

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the marker to a path, replacing any file."""
        with atomic_file(Path(path), overwrite=True) as partial:
            partial.write_text(_FIRST_LINE + json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PartitionMarker | None:
        """Read the marker at a path. Returns None if the file is missing or not a marker."""
        file = Path(path)
        if not file.is_file() or file.stat().st_size > _LIMIT_BYTES:
            return None
        text = file.read_bytes()
        if not text.startswith(_FIRST_LINE.encode()):
            return None
        return decode_dataclass(cls, text[len(_FIRST_LINE) :], str(path), any_text=True)
