"""The Checkpointer: saves one training run in the background and restores it."""

from holdfast.checkpointer.interface import Checkpointer

__all__ = ["Checkpointer"]
