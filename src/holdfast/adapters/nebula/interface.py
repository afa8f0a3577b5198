"""Nebula's functions that search for checkpoints, and `flush_persistence`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from holdfast.adapters.nebula.checkpoint import Checkpoint
from holdfast.adapters.nebula.default_session import session, session_for
from holdfast.adapters.nebula.tag_index import TaggedCheckpoint
from holdfast.adapters.nebula.tags import key_of
from holdfast.checkpoint.exchange.trees import make_plain
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.errors import NotFound
from holdfast.system.privacy import private_folder


def get_checkpoint(tag: str | None = None, persist_path: Any = None) -> Checkpoint | None:
    """Return the nearest checkpoint of a tag, or the newest without a tag, or None.

    Args:
        tag: tag of the checkpoint.
        persist_path: home to search; by default all tiers of the session. If it is the session's own home,
            the nearer tiers are searched too, because they have the same bytes.

    Raises:
        RetryLater: a store failed.
    """
    current = session_for(persist_path)
    tagged = current.find(tag, persist_path) if tag else current.newest(persist_path)
    return None if tagged is None else Checkpoint.found(current, tagged)


def get_latest_checkpoint(persist_path: Any = None) -> Checkpoint:
    """Return the newest checkpoint with valid bytes. Its tag is "" if none exists.

    A SaveWarning names the checkpoints that are skipped because of damage.

    Args:
        persist_path: home in which the checkpoint must be complete; by default any tier of the session,
            memory included.

    Raises:
        Corrupt: all checkpoints are damaged.
        RetryLater: a store failed.

    Ranks: not collective. Each rank reads and verifies the whole checkpoint.
    Blocks: until the checkpoint has been read once.
    """
    current = session_for(persist_path)
    return Checkpoint.found(current, current.newest(persist_path))


def get_latest_checkpoint_path(name: str = "checkpoint", persist_path: Any = None) -> str:
    """Write a partition of the newest checkpoint to a file of `torch.save`.

    Returns its path, or "" without a checkpoint.

    The file is in a private folder in the temporary folder, and is only written once per checkpoint.
    `torch.load(path, weights_only=True)` loads it.

    Args:
        name: name of the partition.
        persist_path: as in `get_latest_checkpoint`.

    Raises:
        NotFound: the newest checkpoint does not have the partition.
        Corrupt: all checkpoints are damaged.
        RetryLater: a store failed.

    Blocks: until the file is durable.
    """
    tagged = session_for(persist_path).newest(persist_path)
    if tagged is None:
        return ""
    index = tagged.index_of(name, 0)
    if index is None:
        raise NotFound(
            f"{tagged.tag} has no partition {name!r}. It has {tagged.names()}.", step=tagged.step, key=name
        )
    path = _file_path(tagged, name)
    if not path.exists():
        for folder in (path.parent.parent.parent, path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        tree = make_plain(tagged.packed(name, index).tree, torch.Tensor)
        with atomic_file(path, overwrite=True) as partial:
            torch.save(tree, partial)
    return str(path)


def _file_path(tagged: TaggedCheckpoint, name: str) -> Path:
    # Other users may create folders in the temporary folder, and a run's id may be any string.
    root = private_folder(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}") / "exports"
    manifest = tagged.checkpoint.manifest
    run = digest(manifest.run.encode())
    return root / run / f"a{manifest.attempt:04d}-step{manifest.step}" / key_of(name)


def list_checkpoints(persist_path: Any = None) -> dict[str, dict[str, Any]]:
    """Return all checkpoints by tag, newest first, as plain values.

    Each has `step`, `attempt`, `bytes`, `files` (partitions), `tiers` (memory, local or home) and `saved`
    (Unix time in seconds).

    Args:
        persist_path: home to list; by default all tiers of the session.

    Raises:
        RetryLater: a store failed.
    """
    found: dict[str, dict[str, Any]] = {}
    for tagged in session_for(persist_path).index(persist_path).checkpoints():
        checkpoint = tagged.checkpoint
        entry = {
            "step": tagged.step,
            "attempt": checkpoint.attempt,
            "bytes": checkpoint.manifest.data_bytes,
            "files": tagged.names(),
            "tiers": list(tagged.tiers),
            "saved": checkpoint.created,
        }
        found.setdefault(tagged.tag, entry)
    return json.loads(json.dumps(found))


def flush_persistence(tag: str | None = None) -> None:
    """Wait until a checkpoint is in home, even if it is not due.

    Without a tag, wait for all checkpoints in near tiers.

    Raises:
        NotFound: the checkpoint does not exist.
        HoldfastError: the newest save failed, or the home has failed for too long.

    Ranks: not collective, but a checkpoint that is not due is copied only after every rank that saves has
        called it.
    Blocks: until the checkpoint is in home.
    """
    session().flush(tag)
