"""Nebula's functions that look for checkpoints, and the one that waits until they are persisted."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from holdfast.adapters.nebula.current import session, session_for
from holdfast.adapters.nebula.handle import Checkpoint
from holdfast.adapters.nebula.shelf import Volume
from holdfast.adapters.nebula.tags import key_of
from holdfast.errors import NotFound
from holdfast.exchange.trees import make_plain
from holdfast.format.hashes import digest
from holdfast.privacy import private_folder
from holdfast.restore.placing import placed_file


def get_checkpoint(tag: str | None = None, persist_path: Any = None) -> Checkpoint | None:
    """The checkpoint of a tag from the nearest tier, or the newest if there is no tag; None if there is none.

    Args:
        tag: its tag.
        persist_path: where to look; by default in all tiers of the session. If it is the session's own home,
            nearer tiers are looked through too: they hold the same bytes.

    Raises:
        RetryLater: a store failed.
    """
    here = session_for(persist_path)
    volume = here.find(tag, persist_path) if tag else here.newest(persist_path)
    return None if volume is None else Checkpoint.found(here, volume)


def get_latest_checkpoint(persist_path: Any = None) -> Checkpoint:
    """The newest checkpoint of which every byte verifies; one with the tag "" if there is none at all.

    What is passed over for damage is told in a SaveWarning.

    Args:
        persist_path: where it must be complete; by default in any tier of the session, memory included.

    Raises:
        Corrupt: there are checkpoints, but all are damaged.
        RetryLater: a store failed.

    Ranks: not collective; each rank reads and verifies the whole.
    Blocks: until the checkpoint has been read once.
    """
    here = session_for(persist_path)
    return Checkpoint.found(here, here.newest(persist_path))


def get_latest_checkpoint_path(name: str = "checkpoint", persist_path: Any = None) -> str:
    """Path of a file of `torch.save` with a partition of the newest checkpoint; "" if there is no checkpoint.

    The file is written into a folder of this user's below the temporary one, and written again only for
    another checkpoint. `torch.load(path, weights_only=True)` takes it.

    Args:
        name: the partition.
        persist_path: as in `get_latest_checkpoint`.

    Raises:
        NotFound: the newest checkpoint has no such partition.
        Corrupt: there are checkpoints, but all are damaged.
        RetryLater: a store failed.

    Blocks: until the file is durable.
    """
    volume = session_for(persist_path).newest(persist_path)
    if volume is None:
        return ""
    index = volume.index_of(name, 0)
    if index is None:
        message = f"{volume.tag} has no partition {name!r}; it has {volume.names()}."
        raise NotFound(message, step=volume.step, key=name)
    path = _cached(volume, name)
    if not path.exists():
        for folder in (path.parent.parent.parent, path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        tree = make_plain(volume.packed(name, index).tree, torch.Tensor)
        with placed_file(path, overwrite=True) as partial:
            torch.save(tree, partial)
    return str(path)


def _cached(volume: Volume, name: str) -> Path:
    # Anybody may make a folder below the temporary one first, and a run's id may be any text.
    root = private_folder(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}") / "exports"
    manifest = volume.checkpoint.manifest
    run = digest(manifest.run.encode())
    return root / run / f"a{manifest.attempt:04d}-step{manifest.step}" / key_of(name)


def list_checkpoints(persist_path: Any = None) -> dict[str, dict[str, Any]]:
    """What there is, newest first, by tag; can be written as JSON.

    Of each tag: `step`, `attempt`, `bytes`, `files` (partitions), `tiers` (of memory, local and home) and
    `saved` (Unix time in seconds).

    Args:
        persist_path: where; by default in all tiers of the session.

    Raises:
        RetryLater: a store failed.
    """
    told: dict[str, dict[str, Any]] = {}
    for volume in session_for(persist_path).shelf(persist_path).volumes():
        checkpoint = volume.checkpoint
        facts = {
            "step": volume.step,
            "attempt": checkpoint.attempt,
            "bytes": checkpoint.manifest.data_bytes,
            "files": volume.names(),
            "tiers": list(volume.tiers),
            "saved": checkpoint.created,
        }
        told.setdefault(volume.tag, facts)
    return json.loads(json.dumps(told))


def flush_persistence(tag: str | None = None) -> None:
    """Wait until a checkpoint is in home, due or not; without a tag, all that near tiers hold.

    Raises:
        NotFound: there is no such checkpoint.
        HoldfastError: the newest save failed, or home has failed for too long.

    Ranks: not collective, but every rank that saves has to call it before what is not due gets home.
    Blocks: until then.
    """
    session().flush(tag)
