"""Seam of the watches in the trainer: the events that a watch of the run receives there.

A watch observes a run, and the core acts. The core calls the events, and knows no watch by name. The seam of
its half in the keeper is `holdfast.checkpoint.keeper.watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Protocol

from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format.sections import Section
from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.checkpoint.keeper.save import Save


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


@dataclass(frozen=True, slots=True)
class CopiedSave:
    """Save whose copy is whole, and leaves for the keeper now.

    Attributes:
        step: optimizer steps completed.
        copies: tensors that the watch has planned to copy, without those whose copies are torn. Its half in
            the keeper receives their hashes, in this order.
        has_room: the staging memory has room for tensors that other ranks write; else they are left out.
    """

    step: int
    copies: tuple[SharedTensor, ...]
    has_room: bool


@dataclass(frozen=True, slots=True)
class RestoredState:
    """State after a restore.

    Attributes:
        step: of the checkpoint; None if training starts from zero.
        section: of the watch, in the manifest of the checkpoint; None without one.
        is_rollback: training went back because of a vote.
        values_before: returns what was recorded for a number of steps before, by step in ascending order.
    """

    step: int | None
    section: Section | None
    is_rollback: bool
    values_before: Callable[[int], Mapping[int, Mapping[str, float]]]


class Act(IntEnum):
    """Act of all ranks that a watch asks for after a step. Of all watches and ranks, the greatest is done."""

    SAVE = 1
    GO_BACK = 2  # to a healthy checkpoint
    STOP = 3  # save, wait until that is durable, and end with status 75


@dataclass(frozen=True, slots=True)
class Vote:
    """Request of a watch, made after a step.

    Attributes:
        act: see `Act`.
        reason: a sentence without its end, for people.
        since: first step of the trouble. A vote that was answered is not answered again for the same one.
        upto: GO_BACK: newest step to go back to.
        most: GO_BACK: rollbacks in a row that are allowed; one more raises `Diverged`.
        skip: GO_BACK: further steps whose samples are left out.
    """

    act: Act
    reason: str
    since: int = 0
    upto: int = 0
    most: int = 3
    skip: int = 0


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

    @property
    def goes_back(self) -> int | None:
        """Steps that a healthy checkpoint stays behind the newest one; None if the watch never goes back."""
        return None

    def restored(self, state: RestoredState) -> None:
        """Observe that the state was restored, or that training starts from zero."""

    def recorded(self, step: int, values: Mapping[str, float]) -> None:
        """Observe the values that were recorded for a step, on rank 0, once they have arrived.

        Steps ascend. The values of a save's steps come before its `saving`.
        """

    def step(self, step: int) -> Vote | None:
        """Observe that a step is complete, in the thread that trains; return what the ranks should do.

        With several ranks, they do it after the next step.
        """

    def planned(self, tensors: Sequence[SharedTensor]) -> Copies | None:
        """Return the tensors to copy and hash at each save, as the structure of the state is new.

        Args:
            tensors: regions of tensors on this rank that other ranks hold too.
        """

    def saving(self, save: CopiedSave) -> Section | None:
        """Return the section of this rank's part, in the thread that copies."""

    def saved(self, save: Save) -> None:
        """Observe that a save is durable, in the thread that trains, with its next call."""

    def end(self) -> None:
        """End the watch: the Checkpointer ends. Watches end in reverse order."""
