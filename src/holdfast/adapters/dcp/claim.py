"""Attempt of a save: this trainer's own, or a new one if that may not have the step."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass

from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.format.part import Ancestors
from holdfast.home.attempts import check_not_fenced, read_claim
from holdfast.home.claim import claim_attempt, claim_run
from holdfast.home.documents import read_manifest
from holdfast.home.listing import Listing, candidates, list_home
from holdfast.policy import line_of
from holdfast.store import Store


@dataclass(frozen=True, slots=True)
class Claim:
    """Facts that all ranks of one save share; the coordinator makes them."""

    run: str
    step: int
    attempt: int
    world_size: int
    ancestors: Ancestors


_claimed: dict[str, Claim] = {}
"""The newest claim of this process by URL of the home."""
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
        run = claim_run(store)
        newest = max(home.attempts, default=0)
        is_own = _is_own(store, newest, world_size, trainer)
        if not is_own and store.url in _claimed:
            check_not_fenced(store, _claimed[store.url].attempt)
        saved = [found.step for found in home.saved.values() if found.attempt == newest]
        goes_on = is_own and step > max(saved, default=-1)
        ancestors = _ancestors_of(store, home, run, newest) if goes_on and saved else None
        if ancestors is None:
            ancestors = _ancestors_before(store, home, run, step)
        attempt = newest
        if not goes_on:
            attempt = claim_attempt(store, run, world_size=world_size, trainer=trainer).number
        _claimed[store.url] = Claim(run, step, attempt, world_size, ancestors)
        return _claimed[store.url]


def _ancestors_of(store: Store, home: Listing, run: str, attempt: int) -> Ancestors | None:
    """The ancestors that earlier saves of an attempt have named; None if none of these can be read."""
    known = _claimed.get(store.url)
    if known is not None and (known.run, known.attempt) == (run, attempt):
        return known.ancestors
    its_own = (found for found in candidates(home) if found[0] == attempt)
    read = (_read_ancestors(store, found, run) for found in its_own)
    return next((ancestors for ancestors in read if ancestors is not None), None)


def _ancestors_before(store: Store, home: Listing, run: str, step: int) -> Ancestors:
    """The line that a new attempt continues with `step`: the newest checkpoint's, up to before that step."""
    complete = candidates(home)
    for newest in complete:
        ancestors = _read_ancestors(store, newest, run)
        if ancestors is None:
            continue
        for base in line_of(complete, newest, ancestors).current:
            its_own = _read_ancestors(store, base, run) if base[1] < step else None
            if its_own is not None:
                return (*its_own, base)
        break
    return ()


def _read_ancestors(store: Store, found: tuple[int, int], run: str) -> Ancestors | None:
    """The ancestors of a checkpoint, given as (attempt, step); None if its manifest cannot be read."""
    attempt, step = found
    with contextlib.suppress(Corrupt, NotFound, Unsupported):
        return read_manifest(store, step, attempt, run).ancestors
    return None


def _is_own(store: Store, number: int, world_size: int, trainer: int) -> bool:
    try:
        found = read_claim(store, number)
    except (NotFound, Corrupt):
        return False
    return (found.host, found.pid, found.world_size) == (socket.gethostname(), trainer, world_size)


def _forget() -> None:
    _claimed.clear()


os.register_at_fork(after_in_child=_forget)
