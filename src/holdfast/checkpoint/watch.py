"""Seam of the watches in the trainer: the events that a watch of the run receives there.

A watch observes a run, and the core acts. The core calls the events, and knows no watch by name. The seam of
its half in the keeper is `holdfast.checkpoint.keeper.watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from msgspec import Struct
from typing_extensions import override

from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format.sections import Section
from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.policy import Every
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import InvalidInput

if TYPE_CHECKING:
    from holdfast.checkpoint.state.review import ResumeRisk


class Note(Protocol):
    """Writer of lines of the history, which are kept until the run is claimed."""

    def __call__(
        self,
        event: str,
        *,
        step: int | None,
        detail: str = "",
        seconds: float = 0.0,
        num_bytes: int = 0,
        tier: str = "",
    ) -> None:
        """Write a line."""
        ...


class WatchedRun(Struct, frozen=True):
    """Parts of a run that a watch in the trainer may use.

    Attributes:
        name: of the watch.
        home: path or URL of the checkpoints.
        store: store of the home.
        rank: number of this rank.
        world_size: number of ranks that save together.
        is_first_here: this is the lowest rank of its host.
        pulse: newest step and phase of this process, in memory that the keeper reads.
        note: writes a line of the history.
        warn: shows a warning to the user, with the next call of the Checkpointer. Threads may call it.
        show: logs a line for the user, on rank 0, unless the option `quiet` is set.
        save_s: returns the time that a step and a durable save take, in seconds, as measured.
        wait: waits until every save is durable, in the thread that trains.
        leave: waits so, and ends this process with status 0, as if its script had ended.
    """

    name: str
    home: str
    store: Store
    rank: int
    world_size: int
    is_first_here: bool
    pulse: Pulse
    note: Note
    warn: Callable[[str], None]
    show: Callable[[str], None]
    save_s: Callable[[], float]
    wait: Callable[[], None]
    leave: Callable[[], NoReturn]

    @property
    def words(self) -> memoryview[int]:
        """Eight words of the pulse for this watch, which its half in the keeper reads.

        Valid until the next call of the Checkpointer: the pulse moves when it is shared with the keeper.
        """
        return self.pulse.words(self.name)


class SharedPlace(Struct, frozen=True):
    """Folder that several ranks of a host share.

    Attributes:
        is_first: this is the lowest of these ranks.
        turn: number of such folders whose lowest rank is lower than that of this one.
    """

    is_first: bool
    turn: int


class CopiedSave(Struct, frozen=True):
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


class RestoredState(Struct, frozen=True):
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

    def __post_init__(self) -> None:
        # Here, in the watch, which is then switched off: an error in the exchange would hang other ranks.
        if not all(isinstance(one, int) for one in (self.since, self.upto, self.most, self.skip)):
            raise InvalidInput(f"The numbers of a Vote must be whole, got {self}.")


class WatchFigure(Struct, frozen=True):
    """Figure of a watch in the report of a run.

    Attributes:
        title: its heading.
        text: its explanation; a blank line separates paragraphs.
        columns: of its table.
        rows: of its table, with a cell for each column.
        chart: a Vega-Lite specification with its values; None for none.
        num_rows_left_out: rows before these, which the table does not have.
    """

    title: str
    text: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | None, ...], ...]
    chart: Mapping[str, Any] | None = None
    num_rows_left_out: int = 0


class Watch:
    """A watch of a run, in the trainer.

    Subclasses override the events that they need. An event that a class does not override costs nothing. The
    events of a watch never overlap. They make no collective call, and none of a Checkpointer. An error in an
    event is shown once, and switches the watch off on this rank: never the training, never a save.

    Attributes:
        name: lower-case letters, digits and hyphens, at most 32; unique among the watches of a run.
        keeper: class of the watch's half in the keeper, as "module:Class"; None without one. A keeper imports
            the module, so it imports no torch, and is not `__main__`.
        events: kinds of lines that the watch writes into the history, with their meanings.
    """

    name: ClassVar[str]
    keeper: ClassVar[str | None] = None
    events: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def applies(self, run: WatchedRun) -> bool:
        """Return whether the watch observes this run; if not, it receives no event."""
        return True

    def options(self) -> Mapping[str, Any]:
        """Return the options of the half in the keeper, as JSON."""
        return {}

    @property
    def place(self) -> str | None:
        """Folder of this host that other ranks may share; None for none."""
        return None

    def begin(self, run: WatchedRun) -> None:
        """Begin to watch: a Checkpointer was made, in the main thread. No attempt is claimed yet."""

    def prepare(self) -> None:
        """Prepare the folder of `place`, on the lowest rank that shares it, before the state is restored.

        It may be called again. All ranks wait until it returns.
        """

    def claimed(self, attempt: int, place: SharedPlace) -> None:
        """Observe that this attempt has claimed the run.

        Args:
            attempt: number of the attempt.
            place: the folder of `place`; without one this rank has its own.
        """

    def loop_began(self) -> None:
        """Observe that a loop asks after each step whether it should save or stop, in its thread."""

    def loop_ended(self) -> None:
        """Observe that the loop has ended or was left."""

    @property
    def goes_back(self) -> int | None:
        """Steps that a healthy checkpoint stays behind the newest one; None if the watch never goes back."""
        return None

    @property
    def every(self) -> Every | None:
        """Policy of saves besides those of the run, the same on all ranks; None for none."""
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

    def save_began(self, step: int) -> None:
        """Observe that the script saves a step, in the thread that trains, before anything is copied."""

    def reviewed(self, risks: Sequence[ResumeRisk]) -> None:
        """Observe why the state may not resume exactly, as found with the first save."""

    def planned(self, tensors: Sequence[SharedTensor]) -> Copies | None:
        """Return the tensors to copy and hash at each save, as the structure of the state is new.

        Args:
            tensors: regions of tensors on this rank that other ranks hold too.
        """

    def saving(self, save: CopiedSave) -> Section | None:
        """Return the section of this rank's part, in the thread that copies."""

    def waiting(self) -> Vote | None:
        """Return what the ranks should do, while training waits between steps or was ended by an error."""

    def saved(self, save: Save) -> None:
        """Observe that a save is durable, in the thread that trains, with its next call."""

    def end(self, timeout_s: float | None) -> None:
        """End the watch: the Checkpointer ends. Watches end in reverse order.

        Args:
            timeout_s: longest time to complete anything; None for no limit.
        """

    def figure(self, lines: Sequence[Mapping[str, Any]]) -> WatchFigure | None:
        """Return the figure of the report; None for none. It is called without a run.

        Args:
            lines: of the history, whose `event` is one of `events`, by time.
        """


class ActionWatch(Watch):
    """Watch with an option `action`, the name of what is done; with "off" nothing is watched.

    Attributes:
        actions: values of the option.
    """

    actions: ClassVar[tuple[str, ...]]
    action: str

    def __post_init__(self) -> None:
        if self.action not in self.actions:
            raise InvalidInput(
                f"{type(self).__name__}(action=) must be one of {', '.join(self.actions)}, "
                f"got {self.action!r:.100}."
            )

    @override
    def applies(self, run: WatchedRun) -> bool:
        return self.action != "off"
