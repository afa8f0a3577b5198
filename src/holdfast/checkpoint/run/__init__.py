"""The Checkpointer: saves one training run in the background and restores it."""

from holdfast.checkpoint.run.interface import Checkpointer

__all__ = ["Checkpointer"]
