"""Calls of a container runtime: their output and errors, stopped when the job does not need them any more."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence

from holdfast.errors import NotFound, RetryLater

_SLICE_S = 0.2
"""Interval for checking whether a call is still wanted."""
_END_S = 5.0
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
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise NotFound(f"The program {command[0]} is not installed on this machine any more.") from error
        try:
            output, words = self._read(process, f"`{command[0]} {command[1]}`", is_logged=is_logged)
        finally:
            _end(process)
        if process.returncode != 0:
            told = words.decode(errors="replace").strip()[-_MAX_WORDS:]
            raise RetryLater(f"`{command[0]} {command[1]}` failed: {told or f'status {process.returncode}'}")
        return output.decode(errors="replace").strip()

    def _read(self, process: subprocess.Popen[bytes], what: str, *, is_logged: bool) -> tuple[bytes, bytes]:
        """Return the output and the errors of a process that ends. Its own children may keep both open."""
        assert process.stdout is not None
        assert process.stderr is not None
        found = {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for pipe in found:
                selector.register(pipe, selectors.EVENT_READ, pipe)
            while selector.get_map():
                has_ended = process.poll() is not None  # before the last output is read
                events = selector.select(0 if has_ended else _SLICE_S)
                if has_ended and not events:
                    break
                for key, _ in events:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    if is_logged:
                        os.write(sys.stdout.fileno(), data)
                    found[key.data] += data
                if not self._is_wanted():
                    raise RetryLater(f"{what} was stopped: the job has ended.")
        process.wait()
        return bytes(found[process.stdout]), bytes(found[process.stderr])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
