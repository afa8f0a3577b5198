"""Notes about checkpoints that a restore has skipped, so that retention does not delete them.

The note is an object in the step's folder. Retention keeps the noted checkpoints of the three newest attempts
that have any (`holdfast.checkpoint.home.retain`), and `holdfast rm` deletes a checkpoint with its note.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.home.documents import read_run
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, NotFound, Unsupported


@dataclass(frozen=True, slots=True)
class Skipped(OfCheckpoint):
    """A checkpoint that a restore has skipped, with the reason."""

    step: int
    attempt: int
    reason: str
    is_superseded: bool = False  # a newer attempt resumed from an older one; its bytes are good


def note_skipped(store: Store, skipped: Iterable[Skipped], run_id: str | None) -> None:
    """Write a note for each skipped checkpoint that has files in `store`.

    Superseded checkpoints get no note: their bytes are good.

    Blocks: until the notes are durable.
    """
    if run_id is None:  # this attempt has not claimed the home yet
        with contextlib.suppress(Corrupt, Unsupported):
            found = read_run(store)
            run_id = found.id if found else None
    for one in skipped:
        saved = list_home(store, step=one.step).saved.get(one.checkpoint_id)
        if one.is_superseded or saved is None or saved.was_skipped:
            continue
        note = run.SkippedNote(run_id or "", one.attempt, one.step, one.reason, noted_unix_s=time.time())
        store.put(names.skipped(one.step, one.attempt), run.document(note))


def drop_note(store: Store, checkpoint: CheckpointId) -> None:
    """Delete the note about a checkpoint that was restored and verified whole."""
    name = names.skipped(checkpoint.step, checkpoint.attempt)
    if store.size(name) is not None:
        store.delete(name)


def read_reason(store: Store, checkpoint: CheckpointId) -> str:
    """Return the reason why a restore has skipped a checkpoint, from its note."""
    name = names.skipped(checkpoint.step, checkpoint.attempt)
    try:
        return run.parse(run.SkippedNote, store.get(name), name).reason
    except (Corrupt, NotFound, Unsupported) as error:
        return str(error)
