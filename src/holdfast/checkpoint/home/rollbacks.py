"""Records of rollbacks in a home: the stretches that training went back behind, and the samples to skip."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from functools import partial

from msgspec import Struct

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.retention import line_of
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Conflict, Corrupt, Denied, NotFound, RetryLater, Unsupported

_MAX_RECORDS = 10_000
"""Rollbacks of a home that are read, the newest."""
_MAX_CHOICES = 4
"""Checkpoints to go back to, as one may be damaged."""


class Rollbacks(Struct, frozen=True):
    """Rollbacks of a home, the oldest first, and descriptions of unreadable ones."""

    found: tuple[run.Rollback, ...] = ()
    unreadable: tuple[str, ...] = ()

    def superseding(self, checkpoint: CheckpointId) -> run.Rollback | None:
        """Return the rollback that a checkpoint was left behind in; None without one."""
        return next((rollback for rollback in self.found if rollback.supersedes(checkpoint)), None)

    def skipped(self) -> dict[str, list[tuple[int, int]]]:
        """Return the ranges of samples to leave out, by the key of an object."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for rollback in self.found:
            for key, samples in rollback.skipped.items():
                ranges.setdefault(key, []).append(samples)
        return ranges


NO_ROLLBACKS = Rollbacks()
"""Rollbacks of a run that has never gone back."""


def write_rollback(stores: Iterable[Store], rollback: run.Rollback) -> None:
    """Write the record of a rollback to all tiers, home last, durably."""
    name, text = names.rollback(rollback.attempt), run.document(rollback)
    *near, home = stores
    for store in near:
        with contextlib.suppress(Denied, RetryLater):  # a restore reads home too
            store.put(name, text)
    home.put(name, text)


def read_rollbacks(stores: Iterable[Store], run_id: str | None) -> Rollbacks:
    """Return the rollbacks of a run, or of any. One that is damaged in all tiers is reported, not raised."""
    found: dict[int, run.Rollback] = {}
    unreadable: dict[int, str] = {}
    for store in stores:
        records = (names.parse_record("rollback", entry.name) for entry in store.list("attempts/"))
        for number in sorted({one.attempt for one in records if one}, reverse=True)[:_MAX_RECORDS]:
            name = names.rollback(number)
            if number in found:
                continue
            try:
                rollback = run.parse(run.Rollback, store.get(name), name)
            except (Corrupt, NotFound, Unsupported) as error:
                unreadable[number] = f"{store.url}/{name}: {error}"
                continue
            if run_id in (None, rollback.run) and rollback.attempt == number:
                found[number] = rollback
    return Rollbacks(
        tuple(found[number] for number in sorted(found)),
        tuple(text for number, text in sorted(unreadable.items()) if number not in found),
    )


def find_healthy(
    stores: Iterable[Store],
    newest: CheckpointId,
    ancestors: Ancestors,
    *,
    run_id: str,
    upto_step: int,
    kept_upto_step: int,
) -> tuple[CheckpointId, ...]:
    """Return the newest healthy checkpoints that training continues, up to a step; a few, the newest first.

    One of them is not newer than `kept_upto_step`, up to which retention keeps the newest healthy one: it may
    delete the others before they are restored.

    Args:
        newest: attempt and last step of the training.
    """
    found: set[CheckpointId] = set()
    for store in stores:
        complete = [one for one in candidates(list_home(store)) if one.step <= upto_step]
        line = line_of(complete, newest, ancestors).current
        is_healthy = partial(_is_healthy, store, run_id)
        found.update(itertools.islice(filter(is_healthy, line), _MAX_CHOICES))
        kept = (one for one in line if one.step <= kept_upto_step)
        found.update(itertools.islice(filter(is_healthy, kept), 1))
    return tuple(sorted(found, reverse=True))


def _is_healthy(store: Store, run_id: str, checkpoint: CheckpointId) -> bool:
    try:
        return read_manifest(store, checkpoint, run_id).health.healthy is True
    except (Conflict, Corrupt, NotFound, Unsupported):
        return False
