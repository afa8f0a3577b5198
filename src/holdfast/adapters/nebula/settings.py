"""Settings from `init()`, with the environment as a fallback."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.store.factory import absolute_place
from holdfast.errors import InvalidInput, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.units import parse_duration

PATH = "NEBULA_PERSISTENT_STORAGE_PATH"
INTERVAL = "NEBULA_PERSISTENT_TIME_INTERVAL"
LOCAL = "HOLDFAST_LOCAL"


@dataclass(frozen=True, slots=True)
class Settings:
    """Home, nearer tier and interval of a session."""

    home: str
    interval_s: float | None  # between two checkpoints that are copied to home; None: every one is
    keep_local: int
    local: str | None  # folder for this run only
    local_root: str | None  # folder of the host with one folder per run


def make_settings(
    path: Any, interval: Any, retention: Any, local: Any, environ: Mapping[str, str]
) -> Settings:
    """Return the settings from arguments and the environment.

    Raises:
        InvalidInput: the home is missing, or a value is invalid.
    """
    home = parse_location(environ.get(PATH) if path is None else path)
    seconds = _interval(environ.get(INTERVAL) if interval is None else interval)
    if isinstance(retention, bool) or not isinstance(retention, int) or retention < 1:
        raise InvalidInput(f"num_of_version_in_retention must be 1 or more, not {retention!r}.")
    root = environ.get(LOCAL)
    if root is None and seconds is not None:
        root = str(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}")
    return Settings(home, seconds, retention, None if local is None else parse_location(local), root)


def parse_location(path: Any) -> str:
    """Return the absolute path or URL of a location. A tuple of one path is accepted with a warning.

    Raises:
        InvalidInput: the location is missing, empty or of another type.
    """
    if isinstance(path, tuple) and len(path) == 1:
        message = (
            f"The path is a tuple, {path!r}, because a comma follows it. Its only element is used. Remove "
            "the comma."
        )
        warn(message, SaveWarning)
        path = path[0]
    if path is None or path == "":
        raise InvalidInput(
            "The location of checkpoints is missing, so nothing can be saved. Call init(path), or "
            f"set {PATH} to a folder or to a URL such as s3://BUCKET/RUN."
        )
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidInput(f"persistent_storage_path must be a path or URL, not {path!r}.")
    return absolute_place(path)


def _interval(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return parse_duration(value, "persistent_time_interval")
    return None if seconds == 0 else parse_duration(seconds, "persistent_time_interval")
