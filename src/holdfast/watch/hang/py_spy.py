"""Stacks that py-spy reads from processes which cannot write their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import Corrupt
from holdfast.system.documents import decode
from holdfast.system.linux.program_runs import run_program
from holdfast.watch.hang.stacks import MAX_FRAMES, MAX_THREADS, Frame, Thread

_LIMIT_S = 15.0
_MAX_BYTES = 4 << 20
_MAX_TEXT = 300


def find_py_spy() -> str | None:
    """Return the path of py-spy beside this Python, or on the PATH; None without it."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def read_stacks(pid: int) -> tuple[Thread, ...]:
    """Return the threads of a process; empty if py-spy is not installed, or may not read the process.

    Source: py-spy 0.4, `py-spy dump --json --nonblocking`.

    Blocks: at most 15 s.
    """
    program = find_py_spy()
    if program is None:
        return ()
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        found = run_program(command, timeout_s=_LIMIT_S)
        # It needs rights that containers often lack.
        return parse_json(found.out) if found.status == 0 else ()
    except (OSError, subprocess.TimeoutExpired, Corrupt):
        return ()


def parse_json(text: bytes) -> tuple[Thread, ...]:
    """Return the threads in the JSON of py-spy.

    Raises:
        Corrupt: it is not a list of threads.
    """
    body = decode(text, "the output of py-spy", max_bytes=_MAX_BYTES, any_text=True)
    if not isinstance(body, list) or not all(isinstance(one, dict) for one in body):
        raise Corrupt("The output of py-spy is not a list of threads.")
    # Oldest thread last, as faulthandler writes them.
    return tuple(_thread(one) for one in reversed(body))[-MAX_THREADS:]


def _thread(one: Mapping[str, Any]) -> Thread:
    frames = one.get("frames")
    if not isinstance(frames, list):
        raise Corrupt("The output of py-spy has a thread without frames.")
    ident = one.get("thread_id")
    return Thread(ident if isinstance(ident, int) else 0, tuple(map(_frame, frames[:MAX_FRAMES])))


def _frame(one: object) -> Frame:
    if not isinstance(one, dict):
        raise Corrupt("The output of py-spy has a frame that is not an object.")
    line = one.get("line")
    file, name = str(one.get("filename"))[-_MAX_TEXT:], str(one.get("name"))[:_MAX_TEXT]
    return Frame(file, line if isinstance(line, int) else 0, name)
