"""Activity of the training thread, from its frames and its state; pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from types import CodeType

from holdfast.watch.hang.places import Kind, frame_kind, loads_data
from holdfast.watch.hang.stacks import Frame

NAME = "slow-ranks"
"""Name of the watch. Its words in the pulse count the samples of each activity."""
_APART = (Kind.COMPILES, Kind.EVALUATES, Kind.DEBUGS)
_MAX_CODES = 10_000
"""Functions whose kind is remembered."""


class Activity(IntEnum):
    """Activity of a thread, as an index of the counts in its pulse."""

    RUNS = 0  # uses a processor, or waits for one
    LOADS = 1  # in a data loader
    SLEEPS = 2  # asleep in anything else of its own, such as a read from a disk
    WAITS = 3  # for other ranks
    APART = 4  # in a phase, an evaluation, a compilation or a debugger, which are not part of a step


OWN = (Activity.RUNS, Activity.LOADS, Activity.SLEEPS)
"""Activities that are a rank's own part of a step."""


class FrameKinds:
    """Kinds of places that functions decide, remembered by function."""

    def __init__(self) -> None:
        self._kinds: dict[CodeType, tuple[Kind | None, bool]] = {}

    def activity(self, codes: Iterable[CodeType], state: str) -> Activity:
        """Return the activity of a thread.

        Args:
            codes: functions that it is in, innermost first.
            state: its state in the kernel: "S" if it is asleep, "D" if it waits for a disk.
        """
        kinds = [self._kind(code) for code in codes]
        if any(kind in _APART for kind, _ in kinds):
            return Activity.APART
        if any(loads for _, loads in kinds):
            return Activity.LOADS
        inner = next((kind for kind, _ in kinds if kind is not None), None)
        if state == "S" and inner in (Kind.WAITS, Kind.SYNCS):
            return Activity.WAITS
        return Activity.SLEEPS if state in ("S", "D") else Activity.RUNS

    def _kind(self, code: CodeType) -> tuple[Kind | None, bool]:
        found = self._kinds.get(code)
        if found is None:
            if len(self._kinds) >= _MAX_CODES:
                self._kinds.clear()
            frame = Frame(code.co_filename, 0, code.co_name)
            found = self._kinds[code] = frame_kind(frame), loads_data(frame)
        return found
