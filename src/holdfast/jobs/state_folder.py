"""Folder of job records and files, which only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import InvalidInput

STATE = "HOLDFAST_STATE"
"""Variable with the path of the folder. Default: $XDG_STATE_HOME/holdfast or ~/.local/state/holdfast."""
_MAX_SHOWN = 200


def state_path() -> Path:
    """Return the path of the folder, which may not exist yet."""
    named = os.environ.get(STATE)
    if named:
        return Path(named).absolute()
    parent = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(parent).expanduser().absolute() / "holdfast"


def state_dir() -> Path:
    """Return the folder, creating it if needed.

    Raises:
        InvalidInput: it cannot be made.
    """
    folder = state_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        shown = f"{folder}" if len(str(folder)) < _MAX_SHOWN else f"{str(folder)[:_MAX_SHOWN]}..."
        raise InvalidInput(
            f"The folder of the jobs, {shown}, cannot be made: {error.strerror}. "
            f"Set {STATE} to a folder of yours."
        ) from error
    return folder
