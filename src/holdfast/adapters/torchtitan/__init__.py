"""Checkpoint manager for torchtitan, which saves in the background. One line of the config chooses it."""

from __future__ import annotations

import importlib.util

from holdfast.errors import Unsupported

_NEEDED = "torchtitan.components.checkpointer"


def _check_version() -> None:
    """Check that the installed torchtitan lets its config choose a checkpoint manager."""
    if importlib.util.find_spec("torchtitan") is None:
        raise Unsupported(
            "holdfast.adapters.torchtitan needs torchtitan, which is not installed. "
            "Install it: pip install 'torchtitan>=0.3'."
        )
    if importlib.util.find_spec(_NEEDED) is None:
        raise Unsupported(
            f"This torchtitan has no {_NEEDED}, so its config cannot choose a checkpoint manager. Upgrade "
            "it: pip install 'torchtitan>=0.3'."
        )


_check_version()

from holdfast.adapters.torchtitan.interface import HoldfastCheckpointManager  # noqa: E402 - the check is first

__all__ = ["HoldfastCheckpointManager"]
