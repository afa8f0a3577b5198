"""What `init` was told, or the environment where it was told nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.callsite import warn
from holdfast.errors import InvalidInput, SaveWarning
from holdfast.store.place import absolute_place
from holdfast.units import parse_duration

PATH = "NEBULA_PERSISTENT_STORAGE_PATH"
INTERVAL = "NEBULA_PERSISTENT_TIME_INTERVAL"
LOCAL = "HOLDFAST_LOCAL"


@dataclass(frozen=True, slots=True)
class Settings:
    """Where checkpoints go, and how often."""

    home: str
    interval_s: float | None  # between two that go home; None: each does
    keep_local: int
    local: str | None  # as given for this run
    local_root: str | None  # a folder of the host, in which each run gets its own


def read_settings(
    path: Any, interval: Any, retention: Any, local: Any, environ: Mapping[str, str]
) -> Settings:
    """The settings that arguments and environment name.

    Raises:
        InvalidInput: no path is named, or something named cannot be used.
    """
    home = place_of(environ.get(PATH) if path is None else path)
    seconds = _interval(environ.get(INTERVAL) if interval is None else interval)
    if isinstance(retention, bool) or not isinstance(retention, int) or retention < 1:
        message = f"num_of_version_in_retention must be 1 or more, got {retention!r}."
        raise InvalidInput(message)
    root = environ.get(LOCAL)
    if root is None and seconds is not None:
        root = str(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}")
    return Settings(home, seconds, retention, None if local is None else place_of(local), root)


def place_of(path: Any) -> str:
    """One spelling for a place, given as a path, a URL, or either with a comma too many behind it.

    Raises:
        InvalidInput: it is none, or empty.
    """
    if isinstance(path, tuple) and len(path) == 1:
        message = (
            f"The path is a tuple, {path!r}: a comma stands behind it. Its one element is taken; remove the "
            "comma."
        )
        warn(message, SaveWarning)
        path = path[0]
    if path is None or path == "":
        message = (
            "No place for checkpoints was named, so nothing would ever be persisted. Call init(path), or "
            f"set {PATH} to a folder or to a URL such as s3://BUCKET/RUN."
        )
        raise InvalidInput(message)
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidInput(f"persistent_storage_path must be one path or URL, got {path!r}.")
    return absolute_place(path)


def _interval(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return parse_duration(value, "persistent_time_interval")
    return None if seconds == 0 else parse_duration(seconds, "persistent_time_interval")
