"""The session of this process: begun by `init`, or by the first call that needs one; ended at exit."""

from __future__ import annotations

import atexit
import os
from typing import Any

from holdfast.adapters.nebula.session import Session
from holdfast.adapters.nebula.settings import read_settings
from holdfast.callsite import warn
from holdfast.errors import SaveWarning

_current: Session | None = None


def init(
    persistent_storage_path: Any = None,
    persistent_time_interval: Any = None,
    num_of_version_in_retention: int = 2,
    *,
    local: Any = None,
) -> None:
    """Say where checkpoints are kept; a later call with another place ends the session of this one.

    Args:
        persistent_storage_path: the home: a folder, or a URL of an object store; by default what
            NEBULA_PERSISTENT_STORAGE_PATH says. Nothing is ever deleted there, but for what a run that went
            back left behind.
        persistent_time_interval: seconds between two checkpoints that are brought home; those between stay
        near.
            By default what NEBULA_PERSISTENT_TIME_INTERVAL says; None or 0 brings each home.
        num_of_version_in_retention: how many of the newest checkpoints stay near.
        local: folder on this host for near copies, of this run alone; by default one in the folder that
            HOLDFAST_LOCAL names, else in the temporary folder. Without an interval there is none.

    Raises:
        InvalidInput: no place was named, or an argument cannot be used.
        HoldfastError: the newest save of the session before failed.

    Ranks: not collective.
    Blocks: until everything that the session before has saved is durable.
    """
    global _current
    settings = read_settings(
        persistent_storage_path, persistent_time_interval, num_of_version_in_retention, local, os.environ
    )
    if _current is not None and _current.is_usable and _current.home == settings.home:
        if _current.settings != settings:
            message = f"There is a session of {settings.home} already; it goes on as it was begun."
            warn(message, SaveWarning)
        return
    before, _current = _current, None
    if before is not None:
        before.close()
    _current = Session(settings)


def session() -> Session:
    """The session there is, else one that the environment describes.

    Raises:
        InvalidInput: neither `init` nor the environment has named a place.
    """
    if _current is None or not _current.is_usable:
        init()
    assert _current is not None
    return _current


def has_session() -> bool:
    """True if `init` was called, or something needed a session."""
    return _current is not None and _current.is_usable


def session_for(persist_path: Any) -> Session:
    """The session there is; else, to look into a named place, one that saves there.

    Raises:
        InvalidInput: no place was named.
    """
    if persist_path is not None and not has_session():
        init(persist_path)
    return session()


def end() -> None:
    """End the session: make durable in home what was saved. Called at the interpreter's exit.

    Raises:
        HoldfastError: the newest save failed.

    Blocks: until everything is durable.
    """
    global _current
    before, _current = _current, None
    if before is not None:
        before.close()


atexit.register(end)
