"""Default session of this process: begun by `init` or the first call that needs it, and ended at exit."""

from __future__ import annotations

import atexit
import os
from typing import Any

from holdfast.adapters.nebula.session import Session
from holdfast.adapters.nebula.settings import make_settings
from holdfast.errors import SaveWarning
from holdfast.system.callsite import warn

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
    previous, _current = _current, None
    if previous is not None:
        previous.close()
    _current = Session(settings)


def session() -> Session:
    """Return the current session, or begin one from the environment.

    Raises:
        InvalidInput: neither `init` nor the environment has set a home.
    """
    if _current is None or not _current.is_usable:
        init()
    assert _current is not None
    return _current


def has_session() -> bool:
    """Return True if a session has begun and not ended."""
    return _current is not None and _current.is_usable


def session_for(persist_path: Any) -> Session:
    """Return the current session, or begin one with `persist_path` as its home.

    Raises:
        InvalidInput: the home is missing.
    """
    if persist_path is not None and not has_session():
        init(persist_path)
    return session()


def end() -> None:
    """End the session, and make its checkpoints durable in home. It is called when the interpreter exits.

    Raises:
        HoldfastError: the newest save failed.

    Blocks: until everything is durable.
    """
    global _current
    previous, _current = _current, None
    if previous is not None:
        previous.close()


atexit.register(end)
