"""Target of a save or load by DCP, from arguments or its checkpoint id; and the claim of a save."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Sequence

from msgspec import Struct

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.claim import check_not_fenced, claim_attempt, claim_run, read_claim
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import Listing, WriterId, candidates, list_home
from holdfast.checkpoint.retention import line_of
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.errors import Conflict, Corrupt, HoldfastError, NotFound, SaveWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.units import parse_step

_ID = re.compile(r"(?:(.*)/)?step-([0-9]+)/*", re.DOTALL)


class Target(Struct, frozen=True):
    """Home as an absolute path or URL, and a step or None."""

    home: str
    step: int | None

    @classmethod
    def of(cls, home: str | os.PathLike[str], step: int | None) -> Target:
        """Return the target of a user's arguments."""
        return cls(absolute_place(home), None if step is None else parse_step(step, "step="))

    def at(self, checkpoint_id: str | os.PathLike[str] | None) -> Target:
        """Return the target of a `checkpoint_id`, or this one without it.

        `HOME/step-N` is step N of that home; N may begin with zeros. Anything else is a home, and the step
        does not change.
        """
        if checkpoint_id is None:
            return self
        text = os.fspath(checkpoint_id)
        if found := _ID.fullmatch(text):
            home = found[1] if found[1] is not None else "."
            return Target.of(home or "/", int(found[2]))
        return Target.of(checkpoint_id, self.step)

    @staticmethod
    def is_valid(checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a store can be opened for a checkpoint id."""
        try:
            open_store(Target.of("", None).at(checkpoint_id).home)
        except HoldfastError:
            return False
        return True


class SaveClaim(Struct, frozen=True):
    """Task of a rank in a save. The coordinator claims it, and sends each rank its own inside the plan."""

    writer: WriterId
    step: int
    ancestors: Ancestors
    catalog: bytes = b""  # tensors of all ranks
    index: str = ""  # index of all ranks' values; only for rank 0


_claimed: dict[str, SaveClaim] = {}
"""Newest claim of this process by URL of the home."""
_lock = threading.Lock()  # two threads may save at the same time


def claim_save(
    store: Store, step: int | None, *, world_size: int, trainer: int, overwrite: bool = True
) -> SaveClaim:
    """Claim an attempt for a save of `step` by rank 0; by default the step after the newest save.

    DCP does not pass on which checkpoint the run was loaded from. The save is assumed to continue the
    newest checkpoint below `step`, so a run that saves an earlier step again supersedes the checkpoints
    after it.
    """
    with _lock:
        home = list_home(store)
        _check_existing(store, home, step, overwrite=overwrite)
        run = claim_run(store)
        newest, complete = max(home.attempts, default=0), candidates(home)
        saved = [found.step for found in home.saved.values() if found.attempt == newest]
        if step is None:
            step = max((*saved, *(one.step for one in complete[:1])), default=0) + 1
        is_own, last = _is_own(store, newest, world_size, trainer), _claimed.get(store.url)
        if not is_own and last is not None:
            check_not_fenced(store, last.writer.attempt)
        continues = is_own and step > max(saved, default=-1)
        if continues and saved and last and (last.writer.run, last.writer.attempt) == (run, newest):
            ancestors = last.ancestors
        else:
            ancestors = _ancestors(store, complete, run, step, attempt=newest if continues else None)
        attempt = newest
        if not continues:
            attempt = claim_attempt(store, run, world_size=world_size, trainer=trainer).number
        _claimed[store.url] = SaveClaim(WriterId(run, attempt, 0, world_size), step, ancestors)
        return _claimed[store.url]


def _check_existing(store: Store, home: Listing, step: int | None, *, overwrite: bool) -> None:
    """Refuse a save of a checkpoint that exists, or warn that it is superseded.

    DCP names a checkpoint by its path, so without a step any checkpoint of the home counts.
    """
    existing = next((one.step for one in candidates(home) if step in (None, one.step)), None)
    if existing is None:
        return
    if not overwrite:
        raise Conflict(
            f"Checkpoint already exists: {store.url} has step {existing}, and overwrite=False. Nothing was "
            "written. Save another step or to another home, or pass overwrite=True to HoldfastWriter.",
            step=existing,
        )
    if step is not None:
        warn(
            f"{store.url} already has a checkpoint of step {step}. This save supersedes it and all later "
            "ones. To refuse such saves, pass overwrite=False to HoldfastWriter.",
            SaveWarning,
        )


def _ancestors(
    store: Store, complete: Sequence[CheckpointId], run: str, step: int, *, attempt: int | None
) -> Ancestors:
    """Return the ancestors of a save of `step` by an attempt: the newest checkpoint's, up to that step."""
    for newest in complete:
        ancestors = _read_ancestors(store, newest, run)
        if ancestors is None:
            continue
        for base in line_of(complete, newest, ancestors).current:
            own = _read_ancestors(store, base, run) if base.step < step else None
            if own is not None:
                return own if base.attempt == attempt else (*own, base)
        break
    return ()


def _read_ancestors(store: Store, found: CheckpointId, run: str) -> Ancestors | None:
    """Return the ancestors of a checkpoint, or None if its manifest is unreadable."""
    with contextlib.suppress(Corrupt, NotFound, Unsupported):
        return read_manifest(store, found, run).ancestors
    return None


def _is_own(store: Store, number: int, world_size: int, trainer: int) -> bool:
    try:
        found = read_claim(store, number)
    except (NotFound, Corrupt):
        return False
    return (found.host, found.pid, found.world_size) == (socket.gethostname(), trainer, world_size)


os.register_at_fork(after_in_child=_claimed.clear)
