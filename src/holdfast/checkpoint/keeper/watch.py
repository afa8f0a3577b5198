"""Seam of the watches in the keeper: the events of half a watch, and the parts of a run for it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.keeper.config import KeeperConfig, WatchConfig
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.lockfile import KeeperInfo
from holdfast.checkpoint.keeper.messages import MAX_DETAIL, ShowText


@dataclass(frozen=True, slots=True)
class KeeperRun:
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

    def show(self, text: str, *, wait_s: float = 0.0) -> bool:
        """Have the trainer print a text: as an error if its reply is waited for, else as a warning.

        Returns:
            False if the trainer did not print it within `wait_s`.
        """
        if wait_s:  # else the reply to a text of another watch may be on its way
            self.inbox.text_shown.clear()
        self.inbox.reply(ShowText(text[:MAX_DETAIL], must_reply=wait_s > 0))
        return wait_s == 0 or self.inbox.text_shown.wait(wait_s)

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
            rank = self.config.rank
            text = f"The watch {self.name!r} has failed in the keeper of rank {rank}: {error!r:.500}."
            self.show(f"{text} Saves are not affected.")
            self.history.record("watch-off", step=None, detail=text)


class KeeperWatch:
    """Half of a watch in the keeper, made from the options that its half in the trainer returns.

    Subclasses override the events that they need. An error in an event never fails a save.

    Args:
        options: see `holdfast.checkpoint.watch.Watch.options`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def start(self, run: KeeperRun) -> None:
        """Begin to watch a trainer, in a process of its own. Must not block."""


def start_watches(halves: Sequence[WatchConfig], run_of: Callable[[str], KeeperRun]) -> None:
    """Start the halves of the watches in this keeper.

    Args:
        halves: their names, classes and options.
        run_of: returns the parts of the run that the watch of a name may use.
    """
    for half in halves:
        run = run_of(half.name)
        run.guard(lambda half=half, run=run: _load(half).start(run))


def _load(half: WatchConfig) -> KeeperWatch:
    module, _, name = half.keeper.partition(":")
    if half.folder not in sys.path:  # a keeper starts without the folders of the user's script
        sys.path.append(half.folder)
    return getattr(importlib.import_module(module), name)(half.options)
