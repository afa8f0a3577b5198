"""Trainers and orphaned keepers of a home on this host."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

from holdfast.checkpoint.home.documents import read_run
from holdfast.checkpoint.home.writer import LiveTrainer
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive, running_keepers
from holdfast.checkpoint.store import open_store
from holdfast.errors import HoldfastError
from holdfast.system.log import get_logger

_log = get_logger("checkpoint.keeper")
_POLL_S = 0.02
_EXIT_S = 2.0
"""Time that a trainer which was just killed may take to disappear."""
NOTIFY_AFTER_S = 1.0
"""Wait after which the user is notified."""


def find_trainers(home: str) -> list[LiveTrainer]:
    """Return the trainers on this host that may still save to a home.

    Neither a process that has closed its Checkpointer counts, nor the keeper of a dead trainer.

    Blocks: at most 2 s, while another process is such a trainer.
    """
    deadline_s = time.monotonic() + _EXIT_S
    while True:
        found = [
            LiveTrainer(info.attempt, info.rank, info.trainer_pid)
            for _, info in running_keepers(home)
            if not info.is_done and is_trainer_alive(info)
        ]
        has_own = any(trainer.pid == os.getpid() for trainer in found)
        if not found or has_own or time.monotonic() > deadline_s:
            return found
        time.sleep(_POLL_S)


def run_filter(home: str) -> Callable[[KeeperInfo], bool]:
    """Return a filter for keepers of the run that is in a home now.

    A home that was deleted and made again holds another run. Keepers of the one before are ignored.
    """

    @functools.cache
    def read() -> str | None:
        """Return the id of the run; "" without one; None if that cannot be read."""
        try:
            found = read_run(open_store(home))
        except HoldfastError:
            return None
        return "" if found is None else found.id

    def is_own(info: KeeperInfo) -> bool:
        if not info.run or read() in (None, info.run):
            return True
        _note_ignored(home, info.run)
        return False

    return is_own


@functools.cache  # one line for each run
def _note_ignored(home: str, run: str) -> None:
    _log.warning("A keeper on this host has a copy of another run, %s, which was in %s. Ignored.", run, home)


def wait_for_orphans(home: str, *, timeout_s: float, notify: Callable[[str], None]) -> bool:
    """Wait for keepers of dead trainers of a home on this host. They may be about to commit.

    Keepers of living trainers are not waited for: a newer attempt fences them. Neither are those that only
    drain, that only keep images in memory, or that save another run.

    Args:
        notify: called with one line after a second.

    Returns:
        True if all have exited.

    Blocks: until they have exited, at most `timeout_s`.
    """
    began, has_notified, is_own = time.monotonic(), False, run_filter(home)
    while orphans := [
        info
        for _, info in running_keepers(home)
        if not info.is_done and not is_trainer_alive(info) and is_own(info)
    ]:
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            return False
        if waited_s > NOTIFY_AFTER_S and not has_notified:
            has_notified = True
            ranks = sorted({info.rank for info in orphans})
            attempt = orphans[0].attempt
            notify(f"waiting for the keepers of ranks {ranks} of attempt {attempt} to complete their saves")
        time.sleep(_POLL_S)
    return True
