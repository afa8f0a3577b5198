"""Programs of the system, run with a time limit and untranslated messages."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import RetryLater

_LIMIT_S = 60.0
_RUNTIME = "XDG_RUNTIME_DIR"


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a program."""

    status: int
    out: bytes
    err: bytes

    @property
    def message(self) -> str:
        """Its error message on one line, or its exit status."""
        text = " ".join((self.err or self.out).decode("utf-8", "replace").split())
        return text or f"exit status {self.status}"


def has_program(name: str) -> bool:
    """Return True if a program is on the PATH."""
    return shutil.which(name) is not None


def run_program(*words: str, given: bytes = b"") -> Ended:
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
        done = subprocess.run(
            words, input=given, capture_output=True, env=environment, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RetryLater(
            f"`{' '.join(words)}` did not end within {_LIMIT_S:.0f} s, and was killed."
        ) from error
    except OSError as error:
        raise RetryLater(f"`{' '.join(words)}` could not be started: {error}.") from error
    return Ended(done.returncode, done.stdout, done.stderr)
