"""The Checkpointer: saves one training run in the background and restores it."""

from holdfast.system.environment import require_linux

require_linux("holdfast.Checkpointer")

from holdfast.checkpoint.run.interface import Checkpointer  # noqa: E402 - what it imports needs Linux

__all__ = ["Checkpointer"]
