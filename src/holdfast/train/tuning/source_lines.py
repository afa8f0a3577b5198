"""Source lines of the running code: the innermost line of the user's own files."""

from __future__ import annotations

import functools
import linecache
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast.train.tuning.measurements import SourceLine

_WATCHERS = f"{Path(__file__).resolve().parent}/"
_HOLDFAST = f"{Path(__file__).resolve().parent.parent.parent}/"
_INTERACTIVE = ("<stdin>", "<string>", "<ipython-input", "<python-input")
# The host waits here by design: optimizers' step counters, gradient scalers, loaders' batches.
_BY_DESIGN = tuple(
    f"/torch/{part}" for part in ("optim/", "amp/", "utils/data/", "distributed/", "_dynamo/", "_inductor/")
)
_BY_DESIGN += ("/torchdata/", "/torch/utils/checkpoint.py", _HOLDFAST)


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), _HOLDFAST.rstrip("/")}
    return tuple(sorted(f"{Path(path).resolve()}/" for path in paths))


@functools.cache
def is_user_code(file: str) -> bool:
    """Return True for a user's file: outside of Python, installed packages and Holdfast."""
    if file.startswith("<"):
        return file.startswith(_INTERACTIVE)
    resolved = str(Path(file).resolve())
    return not resolved.startswith(_libraries()) and not file.startswith(_libraries())


def frames() -> Iterator[FrameType]:
    """Yield the running frames, innermost first, without those of this package."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_WATCHERS):
            yield frame


def current_line() -> SourceLine | None:
    """Return the innermost running line of the user's code, or None."""
    return next((_frame_line(frame) for frame in frames() if is_user_code(frame.f_code.co_filename)), None)


def current_line_and_library() -> tuple[SourceLine, SourceLine | None] | None:
    """Return the innermost line of the user's code, and the library line that it called.

    Returns None without a user's line, or if the running code waits by design.
    """
    inside: FrameType | None = None
    for frame in frames():
        file = frame.f_code.co_filename
        if is_user_code(file):
            return _frame_line(frame), None if inside is None else _frame_line(inside)
        if any(part in file for part in _BY_DESIGN):
            return None
        if inside is None and "/torch/" not in file and not file.startswith("<"):
            inside = frame
    return None


def is_running(*parts: str) -> bool:
    """Return True if the path of a running file contains one of these parts."""
    return any(part in frame.f_code.co_filename for frame in frames() for part in parts)


def function_line(function: Callable[..., Any] | type | None) -> SourceLine | None:
    """Return the first line of a function or method in the user's code, otherwise None."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_user_code(code.co_filename):
        return None
    return line_at(code.co_filename, code.co_firstlineno)


def line_at(file: str, line: int) -> SourceLine:
    """Return a line of a file, with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def innermost_user_line(stack: Iterable[tuple[str, int]]) -> SourceLine | None:
    """Return the innermost line of the user's code in a stack, outermost first; otherwise its last line."""
    lines = list(stack)
    for file, line in reversed(lines):
        if is_user_code(file):
            return line_at(file, line)
    return line_at(*lines[-1]) if lines else None


def format_line(place: SourceLine | None, *, with_code: bool = False) -> str:
    """Format a line as `train.py:12`, relative to the current directory, maybe followed by its code."""
    if place is None:
        return "-"
    path, here = Path(place.file), Path.cwd()
    code = f"   {place.code}" if with_code and place.code else ""
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{place.line}{code}"


def _frame_line(frame: FrameType) -> SourceLine:
    return line_at(frame.f_code.co_filename, frame.f_lineno)
