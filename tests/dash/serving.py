"""The command `holdfast dash` as a process, for tests that connect to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serving(state: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the command for the block; yield its URL and its process."""
    command = [sys.executable, "-m", "holdfast.cli", "dash", "--no-browser", *words]
    env = os.environ | {"HOLDFAST_STATE": str(state)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()
