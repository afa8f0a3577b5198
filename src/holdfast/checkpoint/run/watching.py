"""Watching of a run: calls the events of its watches in the trainer, and switches off those that fail."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.checkpoint.keeper.config import WatchConfig
from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.checkpoint.watch import Note, Watch, WatchedRun
from holdfast.errors import InvalidInput, WatchWarning
from holdfast.system.callsite import warn

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


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
        if not _NAME.fullmatch(name):
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


class Watching:
    """The watches of one Checkpointer, in the order of their events."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        # A copy, as one object may be given to several Checkpointers.
        self._watches = [copy.copy(watch) for watch in watches]
        self._observing: list[Watch] = []  # those that have the event of a step
        self._note: Note | None = None

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
        self._observing = [watch for watch in self._watches if _has(watch, "step")]

    def keeper_halves(self) -> tuple[WatchConfig, ...]:
        """Return the halves of the watches in the keeper."""
        halves: list[WatchConfig] = []
        for watch in self._watches:
            options = None if watch.keeper is None else self._call(watch, "options")
            if watch.keeper is not None and options is not None:
                halves.append(WatchConfig(watch.name, watch.keeper, _folder_of(watch.keeper), dict(options)))
        return tuple(halves)

    def step(self, step: int) -> None:
        """Have the watches observe that a step is complete."""
        for watch in self._observing:
            self._call(watch, "step", step)

    def end(self) -> None:
        """End the watches, in reverse order."""
        for watch in self._watches[::-1]:
            if _has(watch, "end"):
                self._call(watch, "end")

    def _call(self, watch: Watch, event: str, *arguments: Any) -> Any:
        """Call a method of a watch; after an error, switch the watch off and return None."""
        try:
            return getattr(watch, event)(*arguments)
        except Exception as error:  # noqa: BLE001 - a watch must not end the training
            self._switch_off(watch, event, error)
            return None

    def _switch_off(self, watch: Watch, event: str, error: Exception) -> None:
        # New lists, as an event of each watch in the old one may be under way.
        self._watches = [one for one in self._watches if one is not watch]
        self._observing = [one for one in self._observing if one is not watch]
        text = f"The watch {watch.name!r} has failed in {event}(), and is off: {error!r:.500}."
        if self._note is not None:
            self._note("watch-off", step=None, detail=text)
        warn(f"{text} Training continues, and is saved.", WatchWarning)


def _has(watch: Watch, event: str) -> bool:
    """Return whether the class of a watch overrides an event."""
    return getattr(type(watch), event) is not getattr(Watch, event)
