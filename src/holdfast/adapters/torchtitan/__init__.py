"""Checkpoint manager for torchtitan, which saves in the background. One line of the config chooses it."""

from __future__ import annotations

import importlib.util

from holdfast.errors import Unsupported

_NEEDED = "torchtitan.components.checkpointer"
_COMMIT = "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a"


def _check_version() -> None:
    """Check that the installed torchtitan lets its config choose a checkpoint manager.

    Raises:
        Unsupported: it is missing, or older.
    """
    if importlib.util.find_spec("torchtitan") is None:
        raise Unsupported(
            "holdfast.adapters.torchtitan needs torchtitan, which is not installed. Install it from its "
            f"repository, at commit {_COMMIT[:9]} of August 2026 or later."
        )
    if importlib.util.find_spec(_NEEDED) is None:
        raise Unsupported(
            f"This torchtitan has no {_NEEDED}, so its config cannot choose a checkpoint manager. Install "
            f"torchtitan from its repository, at commit {_COMMIT[:9]} of August 2026 or later."
        )


_check_version()

from holdfast.adapters.torchtitan.interface import HoldfastCheckpointManager  # noqa: E402 - the check is first

__all__ = ["HoldfastCheckpointManager"]
