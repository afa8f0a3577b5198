"""SkyPilot in its own environment, installed once from PyPI into the ignored folder `.bench`."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "0.14.1"
FURTHER = ("uv", "grpcio>=1.63.0", "protobuf>=5.29.6,<7")
"""Beside it: the last two every cloud's extra brings, and Slurm's does not; without them its controller
takes an allocation that is gone for an error of its own."""
FOLDER = Path(__file__).parents[3] / ".bench" / f"skypilot-{VERSION}"
"""About 95 packages. `make clean` removes it."""


def skypilot() -> Path:
    """Return the `bin` folder of an environment with SkyPilot and uv. Skips if it cannot be installed."""
    FOLDER.parent.mkdir(exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers want it at once
        if not (FOLDER / "whole").exists():
            _install()
    return FOLDER / "bin"


def _install() -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    words = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words += [f"skypilot=={VERSION}", *FURTHER]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"SkyPilot could not be installed: {done.stderr.strip().splitlines()[-1:]}")
    (FOLDER / "whole").touch()
