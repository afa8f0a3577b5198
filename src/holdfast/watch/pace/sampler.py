"""Sampler of a trainer: a thread that counts the activities of the training thread, a few times a second."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from types import CodeType, FrameType

from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.system.process_exit import complete_at_exit
from holdfast.watch.hang.stacks import Frame, Kind, frame_kind

NAME = "slow-ranks"  # name of the watch. Its words in the pulse count the samples of each activity
_APART = (Kind.COMPILES, Kind.EVALUATES, Kind.DEBUGS)


class Activity(IntEnum):
    """Activity of a thread, as an index of the counts in its pulse."""

    RUNS = 0  # uses a processor, or waits for one
    LOADS = 1  # in a data loader
    SLEEPS = 2  # asleep in anything else of its own, such as a read from a disk
    WAITS = 3  # for other ranks
    APART = 4  # in a phase, an evaluation, a compilation or a debugger, which are not part of a step


OWN = (Activity.RUNS, Activity.LOADS, Activity.SLEEPS)  # activities that are a rank's own part of a step


def activity_of(codes: Iterable[CodeType], state: str) -> Activity:
    """Return the activity of a thread in some functions, innermost first, and its state in the kernel."""
    kinds = [_kind_of(code) for code in codes]
    if any(kind in _APART for kind in kinds):
        return Activity.APART
    if Kind.LOADS in kinds:
        return Activity.LOADS
    inner = next((kind for kind in kinds if kind is not None), None)
    if state == "S" and inner in (Kind.WAITS, Kind.SYNCS):
        return Activity.WAITS
    return Activity.SLEEPS if state in ("S", "D") else Activity.RUNS  # "D": it waits for a disk


@lru_cache(maxsize=10_000)
def _kind_of(code: CodeType) -> Kind | None:
    """Return the kind of place that a function decides."""
    return frame_kind(Frame(code.co_filename, 0, code.co_name))


SAMPLES_PER_WINDOW = 75  # samples in one window of time
_MAX_PERIOD_S = 0.2
_MAX_FRAMES = 200
_STAT_BYTES = 256


class ActivitySampler:
    """Thread that samples the thread that trains, and counts its activities in the pulse.

    A sample takes some 100 microseconds. It needs the GIL for a part of that, and disturbs no system call.
    """

    def __init__(self, pulse: Pulse, window_s: float) -> None:
        self._pulse = pulse
        self._period_s = min(_MAX_PERIOD_S, window_s / SAMPLES_PER_WINDOW)
        self._jitter = random.Random(os.getpid())  # equal pauses could follow the rhythm of the steps
        self._stat: tuple[int, int] | None = None  # thread and descriptor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-pace", daemon=True)

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread.ident is None:
            complete_at_exit(self)
            self._thread.start()

    def end_with_interpreter(self, timeout_s: float | None = None) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    close = end_with_interpreter

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._period_s * self._jitter.uniform(0.5, 1.5)):
                if self._pulse.is_in_loop:
                    self._pulse.words(NAME)[self._sample()] += 1
        finally:
            self._close_stat()

    def _sample(self) -> Activity:
        if self._pulse.is_in_phase:
            return Activity.APART
        state = self._state()
        frame = sys._current_frames().get(self._pulse.thread)
        return activity_of(_codes(frame), state)

    def _state(self) -> str:
        """Return the state of the thread in the kernel, such as "R"; "" if it has ended."""
        thread = self._pulse.kernel_thread
        try:
            if self._stat is None or self._stat[0] != thread:
                self._close_stat()
                path = f"/proc/self/task/{thread}/stat"
                self._stat = thread, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(self._stat[1], _STAT_BYTES, 0)
        except OSError:  # the thread has ended
            return ""
        return text.rpartition(b")")[2][1:2].decode(errors="replace")

    def _close_stat(self) -> None:
        if self._stat is not None:
            with contextlib.suppress(OSError):
                os.close(self._stat[1])
            self._stat = None


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the functions that a thread is in, innermost first."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame.f_code
        frame = frame.f_back
