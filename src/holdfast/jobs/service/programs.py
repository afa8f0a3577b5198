"""Programs of the system, run with a time limit and untranslated messages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from holdfast.errors import RetryLater
from holdfast.system.linux import program_runs

_LIMIT_S = 60.0
_RUNTIME = "XDG_RUNTIME_DIR"


def has_program(name: str) -> bool:
    """Return True if a program is on the PATH."""
    return shutil.which(name) is not None


def run_program(*words: str, given: bytes = b"") -> program_runs.Ended:
    """Run a program, and return its result.

    Args:
        given: its standard input.

    Raises:
        RetryLater: it did not end in time, or could not be started.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    runtime = Path(f"/run/user/{os.getuid()}")
    if _RUNTIME not in environment and runtime.is_dir():  # unset by su, sudo and cron
        environment[_RUNTIME] = str(runtime)
    try:
        return program_runs.run_program(words, timeout_s=_LIMIT_S, given=given, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RetryLater(
            f"`{' '.join(words)}` did not end within {_LIMIT_S:.0f} s, and was killed."
        ) from error
    except OSError as error:
        raise RetryLater(f"`{' '.join(words)}` could not be started: {error}.") from error
