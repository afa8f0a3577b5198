"""Commands of the user that receive a notification, within a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from holdfast.system.linux.program_runs import end_program, given_input

_LIMIT_S = 60.0


def call(command: str, given: bytes, *, environment: Mapping[str, str], directory: str) -> str:
    """Run a command, and return why it failed; empty if it succeeded. Its output is this process's.

    Args:
        given: its standard input, which it may ignore.
    """
    try:
        with given_input(given) as stdin:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=stdin,
                env=dict(environment),
                cwd=directory if Path(directory).is_dir() else "/",
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        return f"it could not be started: {error.strerror if isinstance(error, OSError) else 'invalid text'}"
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_program(process)
        return f"it did not end within {_LIMIT_S:.0f} s, and was killed"
    status = process.returncode
    return "" if status == 0 else f"exit status {status}" if status > 0 else f"killed by signal {-status}"
