"""Standby: a process that has imported the modules of a training, and forks the next start of its script.

A job has `start/` on PYTHONPATH, so Python imports `start/sitecustomize.py` before a script. That file names
the watch in `watch.py`, which starts the process in `__main__.py` after the first save. At the next start of
the script, that process forks, and the process that was started waits for the forked one.

`supervise` needs no start: `supervisor.py` forks the process of a rank again when it dies, and `in_place.py`
calls the function of the training again in the others. They agree by the rounds in `rounds.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_PATH = "PYTHONPATH"


def with_standby(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose scripts have standbys."""
    folders = [str(Path(__file__).with_name("start")), environment.get(_PATH, "")]
    return {**environment, _PATH: os.pathsep.join(folder for folder in folders if folder)}
