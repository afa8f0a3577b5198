"""Seam of the watches in the trainer: the events that a watch of the run receives there.

A watch observes a run, and the core acts. The core calls the events, and knows no watch by name. The seam of
its half in the keeper is `holdfast.checkpoint.keeper.watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from holdfast.checkpoint.keeper.pulse import Pulse


class Note(Protocol):
    """Writer of lines of the history, which are kept until the run is claimed."""

    def __call__(self, event: str, *, step: int | None, detail: str = "", seconds: float = 0.0) -> None:
        """Write a line."""
        ...


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """Parts of a run that a watch in the trainer may use.

    Attributes:
        home: path or URL of the checkpoints.
        rank: number of this rank.
        world_size: number of ranks that save together.
        pulse: newest step and phase of this process, in memory that the keeper reads.
        note: writes a line of the history.
        warn: shows a text to the user, at the line of the user's code that runs now.
    """

    name: str
    home: str
    rank: int
    world_size: int
    pulse: Pulse
    note: Note
    warn: Callable[[str], None]

    @property
    def words(self) -> memoryview[int]:
        """Eight words of the pulse for this watch, which its half in the keeper reads.

        Valid until the next call of the Checkpointer: the pulse moves when it is shared with the keeper.
        """
        return self.pulse.words(self.name)


class Watch:
    """A watch of a run, in the trainer.

    Subclasses override the events that they need. An event that a class does not override costs nothing. The
    events of a watch never overlap. They make no collective call, and none of a Checkpointer. An error in an
    event is shown once, and switches the watch off on this rank: never the training, never a save.

    Attributes:
        name: lower-case letters, digits and hyphens, at most 32; unique among the watches of a run.
        keeper: class of the watch's half in the keeper, as "module:Class"; None without one. A keeper imports
            the module, so it imports no torch, and is not `__main__`.
    """

    name: ClassVar[str]
    keeper: ClassVar[str | None] = None

    def applies(self, run: WatchedRun) -> bool:
        """Return whether the watch observes this run; if not, it receives no event."""
        return True

    def options(self) -> Mapping[str, Any]:
        """Return the options of the half in the keeper, as JSON."""
        return {}

    def begin(self, run: WatchedRun) -> None:
        """Begin to watch: a Checkpointer was made, in the main thread. No attempt is claimed yet."""

    def step(self, step: int) -> None:
        """Observe that a step is complete, in the thread that trains."""

    def end(self) -> None:
        """End the watch: the Checkpointer ends. Watches end in reverse order."""
