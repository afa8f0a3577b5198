"""Which line of the user's code is running: the innermost one that belongs to no library."""

from __future__ import annotations

import functools
import linecache
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast.train.tuning.facts import Place

_WATCHERS = f"{Path(__file__).resolve().parent}/"
_HOLDFAST = f"{Path(__file__).resolve().parent.parent.parent}/"
_TYPED = ("<stdin>", "<string>", "<ipython-input", "<python-input")  # by a person, and in no file
# Where it is by design that the host waits: optimizers' step counters, gradient scalers, loaders' batches.
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
def is_users(file: str) -> bool:
    """True for a file that the user can change: neither Python's, nor installed, nor Holdfast's."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    resolved = str(Path(file).resolve())
    return not resolved.startswith(_libraries()) and not file.startswith(_libraries())


def frames(start: FrameType | None = None) -> Iterator[FrameType]:
    """The running frames, innermost first, without those that watch."""
    frame = start or sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_WATCHERS):
            yield frame
        frame = frame.f_back


def here() -> Place | None:
    """The innermost running line of the user's code; None if there is none."""
    return next((_place(frame) for frame in frames() if is_users(frame.f_code.co_filename)), None)


def here_and_inside() -> tuple[Place, Place | None] | None:
    """The innermost line of the user's code, and the library's line that runs for it, if there is one.

    None if there is no user's line, or if what runs is something that waits by design.
    """
    inside: FrameType | None = None
    for frame in frames():
        file = frame.f_code.co_filename
        if is_users(file):
            return _place(frame), None if inside is None else _place(inside)
        if any(part in file for part in _BY_DESIGN):
            return None
        if inside is None and "/torch/" not in file and not file.startswith("<"):
            inside = frame
    return None


def is_running(*parts: str) -> bool:
    """True if a file with one of these parts in its path is among the running ones."""
    return any(part in frame.f_code.co_filename for frame in frames() for part in parts)


def of_function(function: Callable[..., Any] | type | None) -> Place | None:
    """Where a function or a method begins, if the user can change it."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_users(code.co_filename):
        return None
    return at(code.co_filename, code.co_firstlineno)


def at(file: str, line: int) -> Place:
    """A line of a file, with its text."""
    return Place(file, line, linecache.getline(file, line).strip())


def innermost(stack: Iterable[tuple[str, int]]) -> Place | None:
    """The innermost line of the user's code in a stack of files and lines, outermost first; else the last."""
    lines = list(stack)
    for file, line in reversed(lines):
        if is_users(file):
            return at(file, line)
    return at(*lines[-1]) if lines else None


def say_place(place: Place | None) -> str:
    """`train.py:12`, from where the reader stands."""
    if place is None:
        return "-"
    path, here = Path(place.file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{place.line}"


def _place(frame: FrameType) -> Place:
    return at(frame.f_code.co_filename, frame.f_lineno)
