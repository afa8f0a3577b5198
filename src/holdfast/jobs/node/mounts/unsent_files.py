"""Record of the files of a job that its upload watcher has not seen uploaded."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.mount_spec import caches
from holdfast.jobs.writeback import remove_uploaded
from holdfast.jobs.writeback.status import has_uploader
from holdfast.system.documents import decode_dataclass
from holdfast.system.linux.files import write_atomic
from holdfast.system.log import get_logger

UNSENT = "unsent.json"
"""File in the folder of the attempt, with the newest status."""
_log = get_logger("jobs")
_LIMIT_S = 5.0
"""Time limit for an uploader to exit that has nothing left to do."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class UnsentFiles:
    """Files of a job's write-back directories that are not uploaded.

    `is_settled` is True if nothing more can be uploaded. `is_hopeless` is True if no uploader will continue.
    `summary` has a sentence for each directory with missing files.
    """

    is_settled: bool
    is_hopeless: bool
    summary: str


def write_unsent(path: Path, unsent: UnsentFiles) -> None:
    """Write the status of uploads."""
    write_atomic(path, json.dumps(asdict(unsent)))


def read_unsent(path: Path) -> UnsentFiles | None:
    """Return the newest status of uploads, or None."""
    try:
        return decode_dataclass(UnsentFiles, path.read_bytes(), str(path), any_text=True)
    except FileNotFoundError:
        return None


def remove_copies(folder: JobFolder) -> None:
    """Remove an ended job's write-back directories that are uploaded completely.

    Other directories stay until the job is removed. An error is only logged: it costs disk space.

    Blocks: at most some seconds for uploaders to exit, and for a scan of all files.
    """
    for spec in caches(folder):
        path = Path(spec.path)
        give_up_s = time.monotonic() + _LIMIT_S
        while has_uploader(path) and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
        try:
            remove_uploaded(path)
        except (HoldfastError, OSError) as error:
            _log.warning("the copies of %s in %s were not removed: %s", spec.place, path, error)
