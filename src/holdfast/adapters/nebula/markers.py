"""Small files that stand where a framework expects a checkpoint's file, and say which checkpoint is meant."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.documents import decode_dataclass
from holdfast.restore.placing import placed_file

_FIRST_LINE = "This is no file of torch.save: the state is in a Holdfast checkpoint.\n"
_LIMIT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Marker:
    """Which partition of which checkpoint a file stands for."""

    home: str
    tag: str
    partition: str

    def write(self, path: str | os.PathLike[str]) -> None:
        """Put it at a path, in place of what was there.

        Raises:
            InvalidInput: the path is a folder, or its folder does not exist.
            RetryLater: it could not be written.
        """
        with placed_file(Path(path), overwrite=True) as partial:
            partial.write_text(_FIRST_LINE + json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Marker | None:
        """Return the marker at a path; None if there is something else, or nothing.

        Raises:
            Corrupt: it begins as a marker and is none.
        """
        place = Path(path)
        if not place.is_file() or place.stat().st_size > _LIMIT_BYTES:
            return None
        text = place.read_bytes()
        if not text.startswith(_FIRST_LINE.encode()):
            return None
        return decode_dataclass(cls, text[len(_FIRST_LINE) :], str(path), any_text=True)
