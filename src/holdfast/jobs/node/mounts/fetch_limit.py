"""Limit for the download of a bucket into a write-back directory of a job."""

from __future__ import annotations

import itertools
from contextlib import suppress

from holdfast.checkpoint.store import open_store
from holdfast.errors import Denied, InvalidInput, NotFound, RetryLater
from holdfast.jobs.task.amounts import memory_mib
from holdfast.jobs.task.model import FileMount
from holdfast.system.units import format_bytes

KEY = "config.mount_cached.vfs_cache_max_size"
"""Key of a mount for its limit. SkyPilot limits the cache of rclone with it."""
_DEFAULT = "10G"  # as on SkyPilot
_MAX_LISTED = 10_000
"""Number of objects whose sizes are added up at the launch. The mount itself adds up all."""


def fetch_limit(mount: FileMount) -> int | None:
    """Return the limit of a mount in bytes, or None without one.

    Raises:
        InvalidInput: the limit is not a size.
    """
    config = (mount.spec.get("config") or {}).get("mount_cached") or {}
    value = config.get("vfs_cache_max_size", _DEFAULT)
    if str(value) in ("off", "-1"):
        return None
    mib = memory_mib(value)
    if mib is None:
        raise InvalidInput(f"{KEY}: expected a size, such as 50G, or off, found {value!r}.")
    return mib << 20


def check_fetch(place: str, limit: int | None) -> None:
    """Check that what a place holds is not more than a limit.

    Nothing is checked if the place does not answer: the mount does so too.

    Raises:
        InvalidInput: it holds more.

    Blocks: while the store responds.
    """
    if limit is None:
        return
    num_bytes = 0
    with suppress(Denied, NotFound, RetryLater):
        for entry in itertools.islice(open_store(place).list(), _MAX_LISTED):
            num_bytes += entry.num_bytes
    if num_bytes > limit:
        raise InvalidInput(
            f"{place} holds at least {format_bytes(num_bytes)}, which would be downloaded before `setup`, "
            f"and the limit is {format_bytes(limit)}. Mount a smaller prefix, or set {KEY} to another limit "
            "or to off. Nothing was started."
        )
