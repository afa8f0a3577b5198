"""Commands in a process group of their own, which is killed at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_TAIL_LINES = 15


@contextlib.contextmanager
def process_group(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command for the block, and kill its process group at the end. Its output is written to `log`.

    A process that it has started stays only if that has moved to a group of its own, as keepers do.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_of(log: Path) -> str:
    """Return the last lines of a command's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
