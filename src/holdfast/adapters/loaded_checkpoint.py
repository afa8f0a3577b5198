"""Checkpoint that a Checkpointer may load, opened for reading, also if it lacks its manifest."""

from __future__ import annotations

import holdfast
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.recovery import merge_in_memory
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.tiered import TieredStore


def open_loaded(home: str, step: int, attempt: int | None) -> Checkpoint:
    """Open a checkpoint that was just loaded.

    If a keeper was killed between the last file and the manifest, the checkpoint lacks its manifest until the
    next save, which claims the run. A load takes it nevertheless.

    Raises:
        HoldfastError: as `holdfast.open`.
    """
    store = open_store(home)
    made = None
    if attempt is not None:
        made = merge_in_memory(store, CheckpointId(attempt=attempt, step=step), None)
    return holdfast.open(store if made is None else TieredStore([made, *store.copies()]), step, attempt)
