"""Where the records and the folders of all jobs lie: one folder, which only its owner may read."""

from __future__ import annotations

import os
from pathlib import Path

STATE = "HOLDFAST_STATE"
"""Variable that names the folder; else $XDG_STATE_HOME/holdfast, else ~/.local/state/holdfast."""


def state_dir() -> Path:
    """The folder; made if it is not there."""
    named = os.environ.get(STATE)
    if named:
        folder = Path(named).absolute()
    else:
        parent = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        folder = Path(parent).expanduser().absolute() / "holdfast"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def database(state: Path) -> Path:
    """The file that says what jobs there are and where they stand."""
    return state / "jobs.db"
