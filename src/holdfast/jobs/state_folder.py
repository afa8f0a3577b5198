"""Folder of job records and files, which only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

STATE = "HOLDFAST_STATE"
"""Variable with the path of the folder. Default: $XDG_STATE_HOME/holdfast or ~/.local/state/holdfast."""


def state_dir() -> Path:
    """Return the folder, creating it if needed."""
    named = os.environ.get(STATE)
    if named:
        folder = Path(named).absolute()
    else:
        parent = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        folder = Path(parent).expanduser().absolute() / "holdfast"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
