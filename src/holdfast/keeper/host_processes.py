"""Trainers and orphaned keepers of a home on this host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from holdfast.home.writer import LiveTrainer
from holdfast.keeper.lockfile import is_trainer_alive, running_keepers

_POLL_S = 0.02
_EXIT_S = 2.0
"""Time that a trainer which was just killed may take to disappear."""
_NOTIFY_AFTER_S = 1.0
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


def wait_for_orphans(home: str, *, timeout_s: float, notify: Callable[[str], None]) -> bool:
    """Wait for keepers of dead trainers of a home on this host. They may be about to commit.

    Keepers of living trainers are not waited for: a newer attempt fences them. Neither are those that only
    drain, or that only keep images in memory.

    Args:
        notify: called with one line after a second.

    Returns:
        True if all have exited.

    Blocks: until they have exited, at most `timeout_s`.
    """
    began, has_notified = time.monotonic(), False
    while orphans := [
        info for _, info in running_keepers(home) if not info.is_done and not is_trainer_alive(info)
    ]:
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            return False
        if waited_s > _NOTIFY_AFTER_S and not has_notified:
            has_notified = True
            ranks = sorted({info.rank for info in orphans})
            attempt = orphans[0].attempt
            notify(f"waiting for the keepers of ranks {ranks} of attempt {attempt} to complete their saves")
        time.sleep(_POLL_S)
    return True
