"""Environment variables of commands that run in the virtual environment of a job; pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

VENV = "HOLDFAST_VENV"
"""Variable that is `none` for a job without a virtual environment of its own. Default: `job`."""
DEFAULT = "job"
NONE = "none"

_ELSEWHERE = (
    *("PIP_PREFIX", "PIP_PYTHON", "PIP_ROOT", "PIP_TARGET", "PIP_USER"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON"),
)
"""Variables with which pip and uv install elsewhere than into the active environment."""
_NOT_IN_USER_SITE = {"PIP_USER": "0"}  # settings files of pip may have the opposite


def is_wanted(variables: Mapping[str, str]) -> bool:
    """Return True if a job has a virtual environment of its own."""
    return variables.get(VENV, DEFAULT).strip().lower() != NONE


def install_here(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a shell without those that choose another environment.

    Args:
        base: variables of the shell that launched the job. Those of its task are not changed.
    """
    return {**{name: value for name, value in base.items() if name not in _ELSEWHERE}, **_NOT_IN_USER_SITE}


def activate(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables of commands in a virtual environment.

    Args:
        folder: folder of the environment.
    """
    kept = {name: value for name, value in environment.items() if name != "PYTHONHOME"}
    path = environment.get("PATH", os.defpath)
    return {**kept, "VIRTUAL_ENV": folder, "PATH": f"{folder}/bin:{path}"}
