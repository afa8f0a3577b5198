"""Seam of the watches in the keeper: the events of half a watch, and the parts of a run for it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format import sections
from holdfast.checkpoint.format.sections import MAX_PART_BYTES, Section, Sections
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.judges import CompleteSave, Judges, failed, load_class
from holdfast.checkpoint.keeper.config import KeeperConfig, WatchConfig
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive, running_keepers
from holdfast.checkpoint.keeper.messages import MAX_DETAIL, ShowText, WarnOf


class KeeperRun(Struct, frozen=True):
    """Parts of a run that the half of a watch in a keeper may use.

    Attributes:
        name: name of the watch.
        config: configuration of the keeper.
        trainer: process of the trainer, as the lock file of the keeper describes it.
        history: history of this rank; a store may delay a line of it for ever.
        has_work: returns True while a save is not durable.
        inbox: connection to the trainer.
    """

    name: str
    config: KeeperConfig
    trainer: KeeperInfo
    history: History
    has_work: Callable[[], bool]
    inbox: TrainerInbox

    def warn(self, text: str) -> None:
        """Have the trainer warn of a text, at its next call of the Checkpointer."""
        self.inbox.reply(WarnOf(text[:MAX_DETAIL], is_of_watch=True))

    def show(self, text: str, *, wait_s: float = 0.0) -> bool:
        """Have the trainer print a text: as an error if its reply is waited for, else as a warning.

        Return False if the trainer did not print it within `wait_s`.
        """
        if wait_s:  # else the reply to a text of another watch may be on its way
            self.inbox.text_shown.clear()
        self.inbox.reply(ShowText(text[:MAX_DETAIL], must_reply=wait_s > 0))
        return wait_s == 0 or self.inbox.text_shown.wait(wait_s)

    def ranks_here(self) -> dict[int, KeeperInfo]:
        """Return the lock files of this attempt on this host, by rank; none unless this is the lowest one."""
        found = {
            info.rank: info
            for _, info in running_keepers(self.config.home)
            if info.attempt == self.config.attempt and info.pulse_fd >= 0 and is_trainer_alive(info)
        }
        return found if min(found, default=-1) == self.config.rank else {}

    def in_background(self, work: Callable[[], object]) -> threading.Thread:
        """Run something for the watch in a thread that ends with the keeper; see `guard`."""
        thread = threading.Thread(target=self.guard, args=(work,), name=f"holdfast-{self.name}", daemon=True)
        thread.start()
        return thread

    def guard(self, work: Callable[[], object]) -> None:
        """Run something for the watch. An error in it is shown by the trainer, and recorded."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a watch may be the user's, and must not end the keeper
            self.report(error)

    def report(self, error: Exception) -> None:
        """Show and record an error of the watch."""
        text = f"The watch {self.name!r} has failed in the keeper of rank {self.config.rank}: {error!r:.500}."
        self.show(f"{text} Saves are not affected.")
        self.history.record("watch-off", step=None, detail=text)


class PersistedSave(Struct, frozen=True):
    """Save whose data files are durable, and whose part is written next.

    Attributes:
        step: optimizer steps completed.
        section: of the watch's half in the trainer; None without one.
        hashes: xxh3-64 of each copy that the watch has planned, in the order of its copies; 16 hex digits.
        host: name of this host.
    """

    step: int
    section: Section | None
    hashes: tuple[str, ...]
    host: str


class KeeperWatch:
    """Half of a watch in the keeper, made from the options that its half in the trainer returns.

    Subclasses override the events that they need. An error in an event never fails a save. `committing` is
    also called without `start`, in a trainer that commits what a killed keeper has left.

    Args:
        options: see `holdfast.checkpoint.watch.Watch.options`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def start(self, run: KeeperRun) -> None:
        """Begin to watch a trainer, in a process of its own. Must not block."""

    def persisting(self, image: memoryview) -> Callable[[int, int], None] | None:
        """Return a function that receives each range of a data file as it is hashed; None for none.

        Args:
            image: the whole file. It is valid until `persisted` returns: keep no view of it, or its memory is
                never released. The event comes again if the store has failed.
        """

    def persisted(self, save: PersistedSave) -> Section | None:
        """Return the section of this rank's part, once for each save."""
        return save.section

    def committing(self, save: CompleteSave) -> Section | None:
        """Return the section of the manifest, on rank 0. A second call for a step replaces the first."""
        return sections.merge(save.sections[rank] for rank in sorted(save.sections))

    def committed(self, step: int, section: Section | None) -> None:
        """Observe that this keeper has committed a checkpoint, on rank 0."""

    def trainer_ended(self, *, in_order: bool) -> None:
        """Observe that the trainer has ended; what it has saved may not be durable yet."""


@dataclass(slots=True)
class KeeperWatches:
    """Halves of the watches in one keeper, in the order of their events."""

    configs: Sequence[WatchConfig]
    run_of: Callable[[str], KeeperRun]  # returns the parts of the run that the watch of a name may use
    read_base: Callable[..., Sections]  # see `Judges`
    judges: Judges = field(init=False)
    _halves: dict[str, KeeperWatch] = field(default_factory=dict[str, KeeperWatch])

    def __post_init__(self) -> None:
        for config in self.configs:
            self.run_of(config.name).guard(lambda config=config: self._load(config))
        self.judges = Judges(self._halves, read_base=self.read_base, on_error=self._switch_off)

    def _load(self, config: WatchConfig) -> None:
        if config.folder not in sys.path:  # a keeper starts without the folders of the user's script
            sys.path.append(config.folder)
        self._halves[config.name] = load_class(config.keeper)(config.options)

    def start(self) -> None:
        """Begin to watch the trainer."""
        self._each(lambda half, run: half.start(run))

    def _each(self, call: Callable[[KeeperWatch, KeeperRun], object]) -> None:
        for name, half in list(self._halves.items()):
            run = self.run_of(name)
            run.guard(lambda half=half, run=run: call(half, run))

    def persisting(self, image: memoryview) -> Callable[[int, int], None] | None:
        """Return a function that passes on each hashed range of a data file; None if no watch wants them."""
        wanting: dict[str, Callable[[int, int], None]] = {}
        for name, half in list(self._halves.items()):
            with self._guarded(name):
                if (receive := half.persisting(image)) is not None:
                    wanting[name] = receive

        def pass_on(start: int, stop: int) -> None:
            for name, receive in wanting.items():
                if name in self._halves:
                    with self._guarded(name):
                        receive(start, stop)

        return pass_on if wanting else None

    def persisted(self, step: int, found: Sections, hashes: Mapping[str, tuple[str, ...]]) -> Sections:
        """Return the sections of a part, once for each save, from those that the trainer has found."""
        host = os.uname().nodename
        made: dict[str, Section] = {}
        for name in dict.fromkeys([*(config.name for config in self.configs), *found]):
            section = self._persist(name, PersistedSave(step, found.get(name), hashes.get(name, ()), host))
            if section is not None:
                made[name] = section
        return made

    def _persist(self, name: str, save: PersistedSave) -> Section | None:
        half = self._halves.get(name)
        if half is None:
            is_off = any(config.name == name for config in self.configs)
            return failed(name) if is_off else save.section
        with self._guarded(name):
            section = half.persisted(save)
            return None if section is None else sections.check(section, max_bytes=MAX_PART_BYTES)
        return failed(name)

    def committed(self, step: int) -> None:
        """Pass on that this keeper has committed a checkpoint."""
        made = self.judges.made(step)
        self._each(lambda half, run: half.committed(step, made.get(run.name)))

    def trainer_ended(self, *, in_order: bool) -> None:
        """Pass on that the trainer has ended."""
        self._each(lambda half, _: half.trainer_ended(in_order=in_order))

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Switch a watch off if it fails. It must not fail a save."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it may be the user's
            self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        """Show and record an error of a watch, whose half receives no more events."""
        if self._halves.pop(name, None) is not None:
            self.run_of(name).report(error)
