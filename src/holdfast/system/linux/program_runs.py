"""Runs of programs to their end, whatever processes they leave behind."""

from __future__ import annotations

import errno
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from msgspec import Struct

from holdfast.errors import TimedOut

_LOOK_S = 0.2  # interval between two calls of `on_look`
_END_S = 5.0  # time for a process to end after SIGTERM, and again after SIGKILL
_BLOCK_BYTES = 1 << 16


class Ended(Struct, frozen=True):
    """Result of a program."""

    status: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        """Its output as text."""
        return self.out.decode("utf-8", "replace").strip()

    @property
    def error(self) -> str:
        """Its error output as text."""
        return self.err.decode("utf-8", "replace").strip()

    @property
    def message(self) -> str:
        """Its error message on one line, or its exit status."""
        return " ".join((self.error or self.text).split()) or f"exit status {self.status}"


def run_program(
    command: Sequence[str],
    *,
    timeout_s: float | None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    has_own_session: bool = False,
    on_output: Callable[[bytes], object] = lambda _: None,
    on_look: Callable[[], object] = lambda: None,
) -> Ended:
    """Run a program, and return its result. A process that it leaves behind is not waited for.

    Args:
        on_output: called with each piece of its output and its errors.
        on_look: called while the program runs, every 0.2 s. If it raises, the program is ended.

    Raises:
        TimedOut: it did not end within `timeout_s`.
        OSError: it could not be started.

    Blocks: until it has ended, or for `timeout_s`, and then at most 10 s.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            start_new_session=has_own_session,
        )
    except PermissionError as error:
        is_found = shutil.which(command[0], path=None if env is None else env.get("PATH"))
        if os.sep in command[0] or is_found:
            raise
        # Python reports a folder of PATH that may not be searched, although the program is nowhere.
        raise FileNotFoundError(errno.ENOENT, "not found in PATH", command[0]) from error
    try:
        found = {process.stdout: bytearray(), process.stderr: bytearray()}
        for pipe, data in output_of(process, timeout_s=timeout_s, on_look=on_look):
            on_output(data)
            found[pipe] += data
        return Ended(process.wait(), bytes(found[process.stdout]), bytes(found[process.stderr]))
    finally:
        end_program(process)


def given_input(data: bytes) -> IO[bytes]:
    """Return a file in memory with the standard input of a program."""
    file = os.fdopen(os.memfd_create("holdfast-input"), "w+b")
    file.write(data)
    file.seek(0)
    return file


def output_of(
    process: subprocess.Popen[bytes],
    *,
    timeout_s: float | None = None,
    on_look: Callable[[], object] = lambda: None,
) -> Iterator[tuple[IO[bytes], bytes]]:
    """Yield what a process writes to its pipes, until it ends.

    Its pipes may stay open: a daemon that it has started, as those of git and SkyPilot, has inherited them.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    end = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, pipe)
            while True:
                ready = [key for key, _ in selector.select(_LOOK_S)]
                for key in ready:
                    if key.data is not None:
                        data = os.read(key.fd, _BLOCK_BYTES)
                        if not data:
                            selector.unregister(key.fileobj)
                        yield key.data, data
                if [key.fd for key in ready] == [end]:  # and no output is left
                    return
                on_look()
                if timeout_s is not None and deadline_s is not None and time.monotonic() > deadline_s:
                    words: Any = process.args
                    raise TimedOut(
                        f"`{' '.join(words)}` did not end within {timeout_s:.0f} s, and was killed."
                    )
    finally:
        os.close(end)


def end_program(process: subprocess.Popen[bytes], *, limit_s: float = _END_S) -> None:
    """End a process that still runs, and close its pipes.

    Blocks: at most twice the limit. A process that waits for a disk dies later.
    """
    for end in (process.terminate, process.kill):
        if process.poll() is None:
            end()
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                continue
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
