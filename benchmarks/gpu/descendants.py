"""End of all processes that a command has started, also of those in sessions of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src")]

import psutil  # noqa: E402 - the folder above is not a package

from holdfast.system.linux.processes import adopt_orphans  # noqa: E402

END_S = 30.0
"""Longest wait for killed processes: one may be in a call to the disk that cannot be interrupted."""


def run_alone(command: list[str], out: BinaryIO, *, directory: Path, limit_s: float) -> int | None:
    """Run a command and end all that it has started. Return its exit status; None if the limit ended it.

    Orphans of this process become its children for that, for as long as it lives.

    Blocks: at most `limit_s + END_S`.
    """
    adopt_orphans()
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=directory)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()
        end_descendants()


def end_descendants() -> None:
    """Kill the descendants of this process, again and again, since one may start others meanwhile.

    Blocks: until all are gone, at most `END_S`.
    """
    until_s = time.monotonic() + END_S
    while (found := psutil.Process().children(recursive=True)) and time.monotonic() < until_s:
        for one in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(found, timeout=1.0)  # of those that are children, it also takes the exit status
