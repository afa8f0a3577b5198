"""Watching of a run: calls the events of its watches in the trainer, and switches off those that fail."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

import holdfast
from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format import sections
from holdfast.checkpoint.format.sections import MAX_PART_BYTES, MAX_SECTIONS, WATCH_NAME, Section, Sections
from holdfast.checkpoint.home.judges import load_class
from holdfast.checkpoint.keeper.config import WatchConfig
from holdfast.checkpoint.policy import Every
from holdfast.checkpoint.ranks import RankGroup, this_host
from holdfast.checkpoint.watch import (
    Act,
    CopiedSave,
    Note,
    RestoredState,
    SharedPlace,
    Vote,
    Watch,
    WatchedRun,
)
from holdfast.errors import InvalidInput, WatchWarning
from holdfast.system.callsite import warn
from holdfast.system.environment import WATCH


def choose_watches(given: Iterable[Watch] | None) -> tuple[Watch, ...]:
    """Return the watches of a run: the default ones and those given, which replace defaults of their name.

    Those that the environment names are always added.

    Args:
        given: value of the argument `watches=`; None for no watch at all.
    """
    added = tuple(load_class(name)() for name in os.environ.get(WATCH, "").split(",") if name)
    if given is None:
        return added
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
    chosen = {watch.name: watch for watch in holdfast.default_watches()} | found
    if len(chosen) > MAX_SECTIONS:
        raise InvalidInput(
            f"A run has at most {MAX_SECTIONS} watches, with the default ones; got {len(chosen)}. Give fewer."
        )
    return (*chosen.values(), *added)


def _folder_of(half: str) -> str:
    """Return the folder that a keeper needs to import the class of a watch."""
    module = half.partition(":")[0].partition(".")[0]
    spec = None if module == "__main__" else importlib.util.find_spec(module)
    places = None if spec is None else spec.submodule_search_locations or [spec.origin]
    if not places or places[0] is None:
        raise InvalidInput(
            f"The keeper cannot import {half!r}. It is another process, so the class belongs into a module "
            "of its own, which is installed or stands beside your script."
        )
    return str(Path(places[0]).absolute().parent)


class NamedVote(Struct, frozen=True):
    """Vote of a watch, with the name of the watch."""

    watch: str
    vote: Vote


class Watching:
    """The watches of one Checkpointer, in the order of their events."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        # A copy, as one object may be given to several Checkpointers.
        self._watches = [copy.copy(watch) for watch in watches]
        # The watches that have an event, so that an absent event costs no call.
        self._of_event: dict[str, list[Watch]] = {event: [] for event in _EVENTS}
        self._names = [watch.name for watch in self._watches]  # the same on all ranks
        self._places: dict[str, SharedPlace] = {}
        self._is_looping = False
        self._warnings: deque[str] = deque()
        self._note: Note | None = None
        self._values_lock = threading.Lock()
        self._locks = {watch.name: threading.RLock() for watch in self._watches}

    def begin(self, run_of: Callable[[str, Callable[[str], None]], WatchedRun]) -> None:
        """Begin to watch; `run_of` returns the run as the watch of a name uses it, with its way to warn."""
        for watch in self._watches:
            run = run_of(watch.name, self._warnings.append)
            self._note = run.note
            if not self._call(watch, "applies", run, refuses=True):
                self._watches = [one for one in self._watches if one is not watch]
            elif _has(watch, "begin"):
                self._call(watch, "begin", run, refuses=True)
        self._of_event = {
            event: [watch for watch in self._watches if _has(watch, event)] for event in _EVENTS
        }
        self.show_warnings()

    def show_warnings(self) -> None:
        """Show the warnings of the watches to the user."""
        while self._warnings:
            warn(self._warnings.popleft(), WatchWarning)

    def meet(self, ranks: RankGroup) -> None:
        """Prepare the folders that ranks share, before the state is restored or the run is claimed.

        Ranks: collective.
        Blocks: until all folders are prepared.
        """
        places = {watch.name: watch.place for watch in self._of_event["prepare"]}
        rows = [
            (tuple(host), names, found)
            for host, names, found in ranks.gather((this_host(), self._names, places))
        ]
        _check_same([names for _, names, _ in rows])
        for name in places:
            firsts: dict[tuple[Any, ...], int] = {}
            for rank, (host, _, found) in enumerate(rows):
                firsts.setdefault((*host, found.get(name)), rank)
            key = *rows[ranks.rank][0], places[name]
            self._places[name] = SharedPlace(firsts[key] == ranks.rank, list(firsts).index(key))
        for watch in self._of_event["prepare"]:
            if self._places[watch.name].is_first:
                self._call(watch, "prepare")
        ranks.gather(None)  # the others wait here
        self.show_warnings()

    def notify(
        self, event: Literal["save_began", "reviewed", "saved", "loop_began", "loop_ended"], *arguments: Any
    ) -> None:
        """Have the watches observe an event that has the same arguments for all of them."""
        for watch in self._of_event[event]:
            self._call(watch, event, *arguments)

    def claimed(self, attempt: int) -> None:
        """Have the watches observe that an attempt has claimed the run."""
        for watch in self._of_event["claimed"]:
            place = self._places.get(watch.name, SharedPlace(is_first=True, turn=0))
            self._call(watch, "claimed", attempt, place)

    def set_looping(self, is_looping: bool) -> None:
        """Have the watches observe that a loop has begun that asks after each step what to do, or its end."""
        if is_looping != self._is_looping:
            self._is_looping = is_looping
            self.notify("loop_began" if is_looping else "loop_ended")

    def stop_reason(self) -> str | None:
        """Return why this rank has to stop, between two steps; None if it need not."""
        votes = (self._call(watch, "waiting") for watch in self._of_event["waiting"])
        return next((vote.reason for vote in votes if isinstance(vote, Vote) and vote.act is Act.STOP), None)

    def keeper_halves(self) -> tuple[WatchConfig, ...]:
        """Return the halves of the watches in the keeper."""
        halves: list[WatchConfig] = []
        for watch in self._watches:
            options = None if watch.keeper is None else self._call(watch, "options", check=_plain_options)
            if watch.keeper is not None and options is not None:
                halves.append(WatchConfig(watch.name, watch.keeper, _folder_of(watch.keeper), options))
        return tuple(halves)

    @property
    def goes_back(self) -> int | None:
        """Steps that a healthy checkpoint stays behind the newest one; None if no watch goes back."""
        return max((steps for watch in self._watches if (steps := watch.goes_back) is not None), default=None)

    @property
    def policies(self) -> tuple[Every, ...]:
        """Policies of the saves that the watches need."""
        return tuple(every for watch in self._watches if (every := watch.every) is not None)

    def restored(self, state_of: Callable[[str], RestoredState]) -> None:
        """Have the watches observe that the state was restored, each its own part of the facts."""
        for watch in self._of_event["restored"]:
            self._call(watch, "restored", state_of(watch.name))

    def record(self, take: Callable[[], list[tuple[int, dict[str, float]]]]) -> None:
        """Have the watches observe recorded values by step, which are not taken without such a watch."""
        if not self._of_event["recorded"]:
            return
        with self._values_lock:  # held until they are observed, which keeps the order between two threads
            for step, values in take():
                for watch in self._of_event["recorded"]:
                    self._call(watch, "recorded", step, values)

    def step(self, step: int) -> list[NamedVote]:
        """Have the watches observe that a step is complete, and return their votes."""
        found = [(watch.name, self._call(watch, "step", step)) for watch in self._of_event["step"]]
        self.show_warnings()
        return [NamedVote(name, vote) for name, vote in found if isinstance(vote, Vote)]

    @property
    def plans_copies(self) -> bool:
        """True if a watch may want tensors copied and hashed."""
        return bool(self._of_event["planned"])

    def planned(self, tensors: Sequence[SharedTensor]) -> dict[str, Copies]:
        """Return the tensors that the watches want copied and hashed, of those that other ranks hold too."""
        wanting = self._of_event["planned"]
        found = {watch.name: self._call(watch, "planned", tensors, check=_check_copies) for watch in wanting}
        return {name: copies for name, copies in found.items() if copies is not None}

    def saving(self, step: int, copies: Mapping[str, Sequence[SharedTensor]], *, has_room: bool) -> Sections:
        """Return the sections of this rank's part of a save whose copy is whole; see `CopiedSave`."""
        found: dict[str, Section] = {}
        for watch in self._of_event["saving"]:
            save = CopiedSave(step, tuple(copies.get(watch.name, ())), has_room)
            section = self._call(watch, "saving", save, check=_check_section)
            if section is not None:
                found[watch.name] = section
        return found

    def end(self, timeout_s: float | None) -> None:
        """End the watches, in reverse order."""
        for watch in self._of_event["end"][::-1]:
            self._call(watch, "end", timeout_s)
        self.show_warnings()

    def _call(
        self,
        watch: Watch,
        event: str,
        *arguments: Any,
        check: Callable[[Any], Any] | None = None,
        refuses: bool = False,
    ) -> Any:
        """Call a method of a watch; after an error, switch the watch off and return None.

        Args:
            check: returns the result if it can be used.
            refuses: the watch may refuse the user's arguments.
        """
        try:
            with self._locks[watch.name]:  # events of the training thread and of the copying one
                found = getattr(watch, event)(*arguments)
                return found if check is None else check(found)
        except Exception as error:
            if refuses and isinstance(error, InvalidInput):
                raise
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
        # Not shown here: in the copying thread, a user's filter that raises warnings would fail the save.
        self._warnings.append(f"{text} Training continues, and is saved.")


_EVENTS = (
    *("prepare", "claimed", "restored", "loop_began", "recorded", "step", "waiting"),
    *("save_began", "reviewed", "planned", "saving", "saved", "loop_ended", "end"),
)


def _check_same(names: Sequence[Sequence[str]]) -> None:
    """Raise InvalidInput on every rank if the ranks have other watches."""
    for rank, of_rank in enumerate(names):
        if list(of_rank) != list(names[0]):
            raise InvalidInput(
                f"Rank 0 has the watches {', '.join(names[0])}, and rank {rank} has {', '.join(of_rank)}. "
                "Nothing was restored or saved. Give all ranks the same watches=; a watch leaves out a rank "
                "by its method applies()."
            )


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


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a watch as the keeper will receive them."""
    return json.loads(json.dumps(dict(options)))
