"""Nebula's interface: its session of this process, checkpoints by tag, searches and `flush_persistence`."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from holdfast.adapters.nebula.session import Session
from holdfast.adapters.nebula.tag_index import (
    MapLocation,
    TaggedCheckpoint,
    check_num_of_files,
    check_tag,
    key_of,
)
from holdfast.adapters.nebula.tag_writer import make_settings
from holdfast.checkpoint.exchange.trees import make_plain
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.errors import InvalidInput, NotFound, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.privacy import private_folder

_current: Session | None = None


def init(
    persistent_storage_path: Any = None,
    persistent_time_interval: Any = None,
    num_of_version_in_retention: int = 2,
    *,
    local: Any = None,
) -> None:
    """Configure where checkpoints are stored. A later call with another home ends this home's session.

    Args:
        persistent_storage_path: home: a folder, or a URL of an object store. Defaults to
            NEBULA_PERSISTENT_STORAGE_PATH. Checkpoints in it are never deleted, except those of a run that
            went back.
        persistent_time_interval: seconds between two checkpoints that are copied to home. Those in between
            stay in the nearer tiers. Defaults to NEBULA_PERSISTENT_TIME_INTERVAL; with None or 0 every
            checkpoint is copied.
        num_of_version_in_retention: number of newest checkpoints to keep in the nearer tiers.
        local: folder on this host for near copies of this run only. Defaults to a folder in HOLDFAST_LOCAL,
            or in the temporary folder. Without an interval there are no near copies.

    Raises:
        InvalidInput: the home is missing, or an argument is invalid.
        HoldfastError: the newest save of the previous session failed.

    Ranks: not collective.
    Blocks: until everything that the previous session has saved is durable.
    """
    global _current
    settings = make_settings(
        persistent_storage_path, persistent_time_interval, num_of_version_in_retention, local, os.environ
    )
    if _current is not None and _current.is_usable and _current.home == settings.home:
        if _current.settings != settings:
            warn(f"The session of {settings.home} already exists. Its settings do not change.", SaveWarning)
        return
    end()
    _current = Session(settings)


def session(persist_path: Any = None) -> Session:
    """Return the current session, or begin one with a path as its home, or else from the environment."""
    if not has_session():
        init(persist_path)
    assert _current is not None
    return _current


def has_session() -> bool:
    """Return True if a session has begun and not ended."""
    return _current is not None and _current.is_usable


def end() -> None:
    """End the session, and make its checkpoints durable in home. It is called when the interpreter exits."""
    global _current
    previous, _current = _current, None
    if previous is not None:
        previous.close()


atexit.register(end)


class Checkpoint:
    """State under a tag: any number of partitions that are saved and loaded one by one.

    The checkpoint is complete when all ranks together have saved `num_of_files` partitions under its tag,
    or when `commit` is called. Without the number, the first partition completes it, and a later one makes
    a new version that contains both.

    Args:
        tag: tag; "" if a search did not find a checkpoint.
        num_of_files: number of partitions that all ranks together save; -2 if `commit` completes the
            checkpoint.

    Attributes:
        tag: the tag; "" where a search found none.
    """

    def __init__(self, tag: str, num_of_files: int | None = None) -> None:
        self.tag = check_tag(tag)
        self._num_of_files = check_num_of_files(num_of_files)
        self._tagged: TaggedCheckpoint | None = None
        self._session: Session | None = session()
        self._session.join(tag, self._num_of_files)

    @classmethod
    def found(cls, session: Session | None, tagged: TaggedCheckpoint | None) -> Checkpoint:
        """Return the result of a search, with the tag "" if `tagged` is None."""
        made = cls.__new__(cls)
        made.tag = "" if tagged is None else tagged.tag
        made._num_of_files, made._tagged, made._session = None, tagged, session
        return made

    def __repr__(self) -> str:
        return f"Checkpoint({self.tag!r})"

    def save(self, name: str, value: Any) -> None:
        """Save one partition, as `torch.save` would. You may change its objects when this returns.

        Args:
            name: name of the partition.
            value: tensors, plain values and containers of these. Modules, optimizers and other objects with
                state_dict() and load_state_dict() are saved as their state dicts.

        Raises:
            InvalidInput, Unsupported: an object cannot be saved. The message has its key path.
            HoldfastError: this save failed, or an earlier one.

        Ranks: not collective. Other ranks may save other partitions or none.
        Blocks: for the copy. When several ranks complete their first tag together, until all of them save.
        """
        self._require_session().save(self.tag, name, value, self._num_of_files)

    def commit(self) -> bool:
        """Complete the tag with the partitions that were saved under it.

        Returns:
            True if the checkpoint is copied and submitted to the keeper, which finishes it even if this
            process dies. The next call raises its errors.

        Ranks: each rank that saves to the tag must call it.
        Blocks: like `save`.
        """
        return self._require_session().commit(self.tag)

    def load(self, name: str, map_location: MapLocation = None) -> Any:
        """Load one partition, verified, from the nearest tier that has it.

        Args:
            name: name of the partition. If several ranks have saved it, this rank's own is loaded, or else
                the lowest rank's.
            map_location: as in `torch.load`; None loads every tensor to its device.

        Raises:
            NotFound: the checkpoint or partition does not exist.
            Corrupt: the checkpoint is damaged. Nothing was loaded.
            RetryLater: a store failed.
        """
        if not self.tag:
            raise NotFound(
                "There is no checkpoint to load yet: the tag is ''. Check for that, and start from scratch."
            )
        session = self._require_session()
        tagged = self._tagged or session.index().find(self.tag)
        if tagged is None:
            raise NotFound(f"{session.home} has no complete checkpoint {self.tag!r}.", key=self.tag)
        return session.load(tagged, name, map_location)

    def _require_session(self) -> Session:
        if self._session is None or not self.tag:
            raise InvalidInput(
                "This is the result of a search that did not find a checkpoint. Create a Checkpoint with "
                "a tag to save."
            )
        return self._session


def get_checkpoint(tag: str | None = None, persist_path: Any = None) -> Checkpoint | None:
    """Return the nearest checkpoint of a tag, or the newest without a tag, or None.

    Args:
        tag: tag of the checkpoint.
        persist_path: home to search; by default all tiers of the session. If it is the session's own home,
            the nearer tiers are searched too, because they have the same bytes.
    """
    current = session(persist_path)
    tagged = current.index(persist_path).find(tag) if tag else current.newest(persist_path)
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
    current = session(persist_path)
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
    tagged = session(persist_path).newest(persist_path)
    if tagged is None:
        return ""
    index = tagged.index_of(name, 0)
    # Other users may create folders in the temporary folder, and a run's id may be any string.
    root = private_folder(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}") / "exports"
    manifest = tagged.checkpoint.manifest
    version = f"a{manifest.attempt:04d}-step{manifest.step}"
    path = root / digest(manifest.run.encode()) / version / key_of(name)
    if not path.exists():
        for folder in (path.parent.parent.parent, path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        tree = make_plain(tagged.packed(name, index).tree, torch.Tensor)
        with atomic_file(path, overwrite=True) as partial:
            torch.save(tree, partial)
    return str(path)


def list_checkpoints(persist_path: Any = None) -> dict[str, dict[str, Any]]:
    """Return all checkpoints by tag, newest first, as plain values.

    Each has `step`, `attempt`, `bytes`, `files` (partitions), `tiers` (memory, local or home) and `saved`
    (Unix time in seconds).

    Args:
        persist_path: home to list; by default all tiers of the session.
    """
    found: dict[str, dict[str, Any]] = {}
    for tagged in session(persist_path).index(persist_path).checkpoints():
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
    return found


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
