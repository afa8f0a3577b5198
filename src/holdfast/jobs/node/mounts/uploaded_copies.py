"""Removal of an ended job's copies of files that are in their buckets."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.mount_spec import caches
from holdfast.jobs.writeback import remove_uploaded
from holdfast.jobs.writeback.status import has_uploader
from holdfast.system.log import get_logger

_log = get_logger("jobs")
_LIMIT_S = 5.0
"""Time limit for an uploader to exit that has nothing left to do."""
_POLL_S = 0.05


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
