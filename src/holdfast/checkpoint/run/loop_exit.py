"""Detection of how a for loop over a generator was left: in order, or by an exception."""

from __future__ import annotations

import dis
import gc
import inspect
import sys
from types import FrameType, TracebackType

_PAUSES = frozenset({"YIELD_VALUE", "RESUME", "SEND", "INSTRUMENTED_YIELD_VALUE", "INSTRUMENTED_RESUME"})

Loop = tuple[tuple[int, object], ...]
"""Identities of the frames that requested the last item of a generator, innermost first."""


def looping() -> Loop:
    """Return the frames that requested an item of the calling generator: the loop's, and generators between.

    Call it before each `yield`.
    """
    frames: list[tuple[int, object]] = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        frames.append((id(frame), frame.f_code))
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            break
        frame = frame.f_back
    return tuple(frames)


def is_orderly(leaving: GeneratorExit, loop: Loop, around: BaseException | None) -> bool | None:
    """Return True if a loop was left in order, not by an exception.

    In order means by `break`, `return`, `close()` or the end of another iterator.

    Call it in the generator that the loop runs over, in its handler of GeneratorExit. An exception that ends
    a loop drops the generator too, and is not visible in it. But the interpreter has by then recorded, in a
    traceback, the instruction of the loop's frame that raised, and the frame has not moved since.

    Args:
        leaving: exception that ends the generator.
        loop: frames of the last item, see `looping`.
        around: exception that was being handled when the loop began, if any.

    Returns:
        None if the generator was kept after its loop and is dropped only now, so the frames are gone.

    Blocks: to visit all objects of the process, about 0.1 s for a million.
    """
    if leaving.__context__ is not None and leaving.__context__ is not around:
        return False  # closed by a handler of an exception, or by the `finally` after one
    frame = sys._getframe(1).f_back
    if frame is None or (id(frame), frame.f_code) not in loop:
        return None
    while frame is not None and _has_raised(frame):
        if not _is_paused_generator(frame):
            return False
        frame = frame.f_back  # a generator around this one, which its own loop has left: look at that loop
    return True


def _has_raised(frame: FrameType) -> bool:
    """Return True if the current instruction of a frame has raised an exception."""
    found = gc.get_referrers(frame)
    return any(
        isinstance(one, TracebackType) and one.tb_frame is frame and one.tb_lasti == frame.f_lasti
        for one in found
    )


def _is_paused_generator(frame: FrameType) -> bool:
    """Return True if a frame is a generator paused at a `yield`."""
    is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    return is_generator and dis.opname[frame.f_code.co_code[frame.f_lasti]] in _PAUSES
