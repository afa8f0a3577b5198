"""Watching of a run: calls the events of its watches in the trainer, and switches off those that fail."""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format import sections
from holdfast.checkpoint.format.sections import MAX_PART_BYTES, WATCH_NAME, Section, Sections
from holdfast.checkpoint.keeper.config import WatchConfig
from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.watch import CopiedSave, Note, RestoredState, Vote, Watch, WatchedRun
from holdfast.errors import InvalidInput, WatchWarning
from holdfast.system.callsite import warn


def choose_watches(given: Iterable[Watch] | None) -> tuple[Watch, ...]:
    """Return the watches of a run: the default ones and those given, which replace defaults of their name.

    Args:
        given: value of the argument `watches=`; None for no watch at all.

    Raises:
        InvalidInput: one of them is no watch, or two have the same name.
    """
    if given is None:
        return ()
    found: dict[str, Watch] = {}
    for watch in given:
        if not isinstance(watch, Watch):
            raise InvalidInput(f"watches= takes objects such as holdfast.Hang(), got {watch!r:.100}.")
        name = getattr(watch, "name", "")
        if not WATCH_NAME.fullmatch(name):
            raise InvalidInput(
                "The name of a watch has at most 32 lower-case letters, digits and hyphens, "
                f'got {name!r:.100}. Set it in the class: name = "my-watch".'
            )
        if watch.name in found:
            raise InvalidInput(f"watches= has two watches with the name {watch.name!r}. Give one of them.")
        if watch.keeper is not None:
            _folder_of(watch.keeper)
        found[watch.name] = watch
    return tuple(({watch.name: watch for watch in holdfast.default_watches()} | found).values())


def _folder_of(half: str) -> str:
    """Return the folder that a keeper needs to import the class of a watch.

    Raises:
        InvalidInput: it cannot be imported there.
    """
    module = half.partition(":")[0].partition(".")[0]
    spec = None if module == "__main__" else importlib.util.find_spec(module)
    places = None if spec is None else spec.submodule_search_locations or [spec.origin]
    if not places or places[0] is None:
        raise InvalidInput(
            f"The keeper cannot import {half!r}. It is another process, so the class belongs into a module "
            "of its own, which is installed or stands beside your script."
        )
    return str(Path(places[0]).absolute().parent)


@dataclass(frozen=True, slots=True)
class NamedVote:
    """Vote of a watch, with the name of the watch."""

    watch: str
    vote: Vote


class Watching:
    """The watches of one Checkpointer, in the order of their events."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        # A copy, as one object may be given to several Checkpointers.
        self._watches = [copy.copy(watch) for watch in watches]
        # The watches that have an event, so that an absent event costs no call.
        self._of_event: dict[str, list[Watch]] = {}
        self._note: Note | None = None
        self._values_lock = threading.Lock()
        self._locks = {watch.name: threading.RLock() for watch in self._watches}

    def begin(self, *, home: str, rank: int, world_size: int, pulse: Pulse, note: Note) -> None:
        """Begin to watch.

        Args:
            home: path or URL of the checkpoints.
            rank: number of this rank.
            world_size: number of ranks that save together.
            pulse: of this process.
            note: writes a line of the history.
        """
        self._note = note
        for watch in self._watches:
            show = partial(warn, category=WatchWarning)
            run = WatchedRun(watch.name, home, rank, world_size, pulse, note, show)
            if not self._call(watch, "applies", run):
                self._watches = [one for one in self._watches if one is not watch]
            elif _has(watch, "begin"):
                self._call(watch, "begin", run)
        self._of_event = {
            event: [watch for watch in self._watches if _has(watch, event)] for event in _EVENTS
        }

    def keeper_halves(self) -> tuple[WatchConfig, ...]:
        """Return the halves of the watches in the keeper."""
        halves: list[WatchConfig] = []
        for watch in self._watches:
            options = None if watch.keeper is None else self._call(watch, "options")
            if watch.keeper is not None and options is not None:
                halves.append(WatchConfig(watch.name, watch.keeper, _folder_of(watch.keeper), dict(options)))
        return tuple(halves)

    @property
    def goes_back(self) -> int | None:
        """Steps that a healthy checkpoint stays behind the newest one; None if no watch goes back."""
        return max((steps for watch in self._watches if (steps := watch.goes_back) is not None), default=None)

    def restored(self, state_of: Callable[[str], RestoredState]) -> None:
        """Have the watches observe that the state was restored.

        Args:
            state_of: returns what the watch of a name receives.
        """
        for watch in self._of_event["restored"]:
            self._call(watch, "restored", state_of(watch.name))

    def record(self, take: Callable[[], list[tuple[int, dict[str, float]]]]) -> None:
        """Have the watches observe recorded values, in the order of their steps.

        Args:
            take: returns the new values by step; it is not called without such a watch.
        """
        if not self._of_event["recorded"]:
            return
        with self._values_lock:  # held until they are observed, which keeps the order between two threads
            for step, values in take():
                for watch in self._of_event["recorded"]:
                    self._call(watch, "recorded", step, values)

    def step(self, step: int) -> list[NamedVote]:
        """Have the watches observe that a step is complete, and return their votes."""
        found = [(watch.name, self._call(watch, "step", step)) for watch in self._of_event["step"]]
        return [NamedVote(name, vote) for name, vote in found if isinstance(vote, Vote)]

    def saved(self, save: Save) -> None:
        """Have the watches observe that a save is durable."""
        for watch in self._of_event["saved"]:
            self._call(watch, "saved", save)

    @property
    def plans_copies(self) -> bool:
        """True if a watch may want tensors copied and hashed."""
        return bool(self._of_event["planned"])

    def planned(self, tensors: Sequence[SharedTensor]) -> dict[str, Copies]:
        """Return the tensors that the watches want copied and hashed, by the name of the watch.

        Args:
            tensors: those that other ranks hold too.
        """
        wanting = self._of_event["planned"]
        found = {watch.name: self._call(watch, "planned", tensors, check=_check_copies) for watch in wanting}
        return {name: copies for name, copies in found.items() if copies is not None}

    def saving(
        self, step: int, copies: Mapping[str, tuple[SharedTensor, ...]], *, has_room: bool
    ) -> Sections:
        """Return the sections of this rank's part.

        Args:
            step: the save, whose copy is whole.
            copies: tensors that were copied for the watches.
            has_room: see `CopiedSave`.
        """
        found: dict[str, Section] = {}
        for watch in self._of_event["saving"]:
            save = CopiedSave(step, copies.get(watch.name, ()), has_room)
            section = self._call(watch, "saving", save, check=_check_section)
            if section is not None:
                found[watch.name] = section
        return found

    def end(self) -> None:
        """End the watches, in reverse order."""
        for watch in self._watches[::-1]:
            if _has(watch, "end"):
                self._call(watch, "end")

    def _call(
        self, watch: Watch, event: str, *arguments: Any, check: Callable[[Any], Any] = lambda found: found
    ) -> Any:
        """Call a method of a watch; after an error, switch the watch off and return None.

        Args:
            check: returns the result if it can be used.
        """
        try:
            with self._locks[watch.name]:  # events of the training thread and of the copying one
                return check(getattr(watch, event)(*arguments))
        except Exception as error:  # noqa: BLE001 - a watch must not end the training
            self._switch_off(watch, event, error)
            return None

    def _switch_off(self, watch: Watch, event: str, error: Exception) -> None:
        # New lists, as an event of each watch in the old one may be under way.
        self._watches = [one for one in self._watches if one is not watch]
        self._of_event = {
            event: [one for one in watches if one is not watch] for event, watches in self._of_event.items()
        }
        text = f"The watch {watch.name!r} has failed in {event}(), and is off: {error!r:.500}."
        if self._note is not None:
            self._note("watch-off", step=None, detail=text)
        warn(f"{text} Training continues, and is saved.", WatchWarning)


_EVENTS = ("restored", "recorded", "step", "planned", "saving", "saved")


def _has(watch: Watch, event: str) -> bool:
    """Return whether the class of a watch overrides an event."""
    return getattr(type(watch), event) is not getattr(Watch, event)


def _check_copies(found: Copies | None) -> Copies | None:
    if found is not None and not all(
        turns and all(isinstance(turn, tuple) for turn in turns) for turns in found.groups
    ):
        raise InvalidInput("a group of copies has no turn")
    return found


def _check_section(found: Section | None) -> Section | None:
    return None if found is None else sections.check(found, max_bytes=MAX_PART_BYTES)
