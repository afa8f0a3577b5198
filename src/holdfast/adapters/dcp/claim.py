"""Which attempt a save belongs to: that of this trainer if it still may have the step, else a new one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import Conflict, Corrupt, NotFound, Unsupported
from holdfast.format import names
from holdfast.format import run as runs
from holdfast.keeper.commit import check_not_fenced
from holdfast.policy import line_of
from holdfast.restore.find import Home, candidates, list_home, read_manifest, read_run
from holdfast.store import Store


@dataclass(frozen=True, slots=True)
class Claim:
    """What all ranks of one save must agree on; the coordinator makes it."""

    run: str
    step: int
    attempt: int
    world_size: int
    base_step: int | None


_claimed: dict[str, int] = {}
"""Newest attempt that this process has claimed, by URL of the home."""
_lock = threading.Lock()  # two saves may be on their way in two threads


def claim(store: Store, step: int, *, world_size: int, trainer: int) -> Claim:
    """The claim under which `step` is saved.

    DCP does not tell a save what the run was loaded from. It is taken to continue the newest checkpoint
    below `step`, so one that goes back and saves an earlier step again supersedes what came after it.

    Args:
        store: the home.
        step: the step to be saved.
        world_size: ranks that save.
        trainer: process id of the trainer, which may be another process than this one.

    Raises:
        Conflict: another trainer has taken this home over.
        Corrupt: the home's documents are damaged.
        RetryLater: the store failed.
    """
    with _lock:
        home = list_home(store)
        run = _claim_run(store)
        newest = max(home.attempts, default=0)
        bases = dict(_bases(store, home, run))
        if _is_own(store, newest, world_size, trainer):
            saved = [found.step for found in home.saved.values() if found.attempt == newest]
            if step > max(saved, default=-1):
                base = next((base for (attempt, _), base in bases.items() if attempt == newest), None)
                if not saved:
                    base = _base(bases, step)
                _claimed[store.url] = newest
                return Claim(run, step, newest, world_size, base)
        elif store.url in _claimed:
            check_not_fenced(store, _claimed[store.url])
        number = _claim_next(store, newest + 1, run, world_size, trainer)
        _claimed[store.url] = number
        return Claim(run, step, number, world_size, _base(bases, step))


def _bases(store: Store, home: Home, run: str) -> Iterator[tuple[tuple[int, int], int | None]]:
    """((attempt, step), base step) of every checkpoint whose manifest can be read."""
    for attempt, step in candidates(home):
        with contextlib.suppress(Corrupt, NotFound, Unsupported):
            yield (attempt, step), read_manifest(store, step, attempt, run).base_step


def _base(bases: dict[tuple[int, int], int | None], step: int) -> int | None:
    """The newest step before `step` in the line that the newest checkpoint continues."""
    return max((found for _, found in line_of(bases.items()).current if found < step), default=None)


def _is_own(store: Store, number: int, world_size: int, trainer: int) -> bool:
    try:
        found = runs.parse(runs.Attempt, store.get(names.attempt(number)), names.attempt(number))
    except (NotFound, Corrupt):
        return False
    return (found.host, found.pid, found.world_size) == (socket.gethostname(), trainer, world_size)


def _claim_next(store: Store, number: int, run: str, world_size: int, trainer: int) -> int:
    while True:
        document = runs.Attempt(number, run, world_size, socket.gethostname(), trainer, time.time())
        try:
            store.put(names.attempt(number), runs.document(document), if_absent=True)
        except Conflict:
            number += 1  # somebody else was quicker
        else:
            return number


def _claim_run(store: Store) -> str:
    found = read_run(store) or runs.Run(uuid.uuid4().hex, created_unix_s=time.time())
    with contextlib.suppress(Conflict):
        store.put(names.RUN, runs.document(found), if_absent=True)
    there = read_run(store)
    assert there is not None
    return there.id


def _forget() -> None:
    _claimed.clear()


os.register_at_fork(after_in_child=_forget)
