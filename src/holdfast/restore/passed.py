"""Notes about checkpoints that a restore has passed over, which keep retention from deleting them.

The note is an object beside the checkpoint's own. Retention keeps the noted checkpoints of the three newest
attempts that have any (`holdfast.keeper.retain`), and `holdfast rm` deletes a checkpoint with its note.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from holdfast.format import names, run
from holdfast.restore.find import Passed, list_home
from holdfast.store.contract import Store


def note_passed(store: Store, passed: Iterable[Passed], run_id: str | None) -> None:
    """Write a note for each checkpoint that was passed over and has files in `store`.

    Superseded checkpoints get none: that they are left behind says nothing about their bytes.

    Raises:
        Denied: the store cannot be written to.
        RetryLater: the store failed.

    Blocks: until the notes are durable.
    """
    for one in passed:
        saved = list_home(store, step=one.step).saved.get((one.step, one.attempt))
        if one.is_superseded or saved is None or saved.was_passed:
            continue
        note = run.Passed(run_id or "", one.attempt, one.step, one.reason, noted_unix_s=time.time())
        store.put(names.passed(one.step, one.attempt), run.document(note))


def drop_note(store: Store, step: int, attempt: int) -> None:
    """Delete the note about a checkpoint, if there is one: it was restored and every byte verified.

    Raises:
        Denied: the store cannot be written to.
        RetryLater: the store failed.
    """
    name = names.passed(step, attempt)
    if store.size(name) is not None:
        store.delete(name)
