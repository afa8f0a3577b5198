"""Stacks of a process: the text that faulthandler writes, parsed into threads and frames; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_FRAMES = 100
"""Frames of a thread that are kept, innermost first."""
MAX_THREADS = 64
"""Threads of a process that are kept."""
_MAX_TEXT = 300

_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-fA-F]+)(?: \[(.*?)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """Call of a function."""

    file: str
    line: int  # 0 if it is not known
    function: str


@dataclass(frozen=True, slots=True)
class Thread:
    """Thread of a process, with its calls, innermost first."""

    ident: int
    frames: tuple[Frame, ...]


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """Return the threads in a text of faulthandler. Lines of other kinds are left out.

    Source: Python's `faulthandler.register(all_threads=True)`.
    """
    found: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            found.append((int(head[1], 16), []))
        elif found and (frame := _FRAME.match(line)):
            file, number, function = frame[1][-_MAX_TEXT:], frame[2], frame[3][:_MAX_TEXT]
            found[-1][1].append(Frame(file, int(number) if number.isdecimal() else 0, function))
    return tuple(Thread(ident, tuple(frames[:MAX_FRAMES])) for ident, frames in found[-MAX_THREADS:])


def main_thread(threads: tuple[Thread, ...], ident: int) -> Thread | None:
    """Return the thread that trains; None if its stack was not written.

    Args:
        ident: its identifier; 0 for the oldest thread, which is written last.
    """
    if ident == 0:
        return threads[-1] if threads else None
    return next((one for one in threads if one.ident == ident), None)
