"""Record of the files of a job that are not uploaded, by its upload watcher."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.system.documents import decode_dataclass
from holdfast.system.linux.files import write_atomic

UNSENT = "unsent.json"
"""File in the folder of the attempt, with the newest status."""


@dataclass(frozen=True, slots=True)
class UnsentFiles:
    """Files of a job's write-back directories that are not uploaded.

    `is_settled` is True if nothing more can be uploaded. `is_hopeless` is True if no uploader will continue.
    `told` has a sentence for each directory with missing files.
    """

    is_settled: bool
    is_hopeless: bool
    told: str


def write_unsent(path: Path, unsent: UnsentFiles) -> None:
    """Write the status of uploads."""
    write_atomic(path, json.dumps(asdict(unsent)))


def read_unsent(path: Path) -> UnsentFiles | None:
    """Return the newest status of uploads, or None.

    Raises:
        Corrupt: the document is damaged.
    """
    try:
        return decode_dataclass(UnsentFiles, path.read_bytes(), str(path), any_text=True)
    except FileNotFoundError:
        return None
