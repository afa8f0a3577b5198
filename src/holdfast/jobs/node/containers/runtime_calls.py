"""Calls of a container runtime: their output and errors, stopped when the job does not need them any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from holdfast.errors import NotFound, RetryLater
from holdfast.system.linux.program_runs import run_program

_MAX_WORDS = 2000


class RuntimeCalls:
    """Calls of a container runtime.

    Args:
        is_wanted: returns False once calls should end.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted

    def run(self, command: Sequence[str], *, is_logged: bool = False) -> str:
        """Run a command, and return what it prints.

        Args:
            is_logged: write its output to the log of this process as it comes.

        Raises:
            RetryLater: it failed, or is not wanted any more. The message has its own words.
            NotFound: the program is not installed.

        Blocks: as long as the command runs.
        """
        what = f"`{command[0]} {command[1]}`"

        def check() -> None:
            if not self._is_wanted():
                raise RetryLater(f"{what} was stopped: the job has ended.")

        def log(data: bytes) -> None:
            if is_logged:
                os.write(sys.stdout.fileno(), data)

        try:
            done = run_program(command, timeout_s=None, has_own_session=True, on_output=log, on_look=check)
        except FileNotFoundError as error:
            raise NotFound(f"The program {command[0]} is not installed on this machine any more.") from error
        if done.status != 0:
            raise RetryLater(f"{what} failed: {done.error[-_MAX_WORDS:] or f'status {done.status}'}")
        return done.text
