"""`orbax-checkpoint`: the `AsyncCheckpointer` of JAX, given NumPy views of the tensors.

The views are made by `Tensor.numpy()`, which copies nothing. Orbax copies what is in host memory itself. A
load returns NumPy arrays, which are copied into the live tensors.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from .contract import Peer, Pending


class Orbax(Peer):
    """`AsyncCheckpointer` of a `StandardCheckpointHandler`, with its defaults, of one flat dict."""

    title = "Orbax AsyncCheckpointer, NumPy views"
    module = "orbax.checkpoint"
    package = "orbax-checkpoint"
    syncs = False
    overlaps = True

    def open(self) -> None:
        """Make the checkpointer."""
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import orbax.checkpoint as orbax  # pyright: ignore[reportMissingImports] - in peers/requirements.txt

        self._args = orbax.args
        self._checkpointer = orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())

    def save(self, step: int) -> Pending:
        """Copy on the caller, write in threads."""
        self._checkpointer.save(self.path(step).resolve(), args=self._args.StandardSave(self._views()))
        return Pending(wait_complete=self._checkpointer.wait_until_finished)

    def load(self, step: int) -> None:
        """Restore arrays and copy them into the live tensors."""
        found = self._checkpointer.restore(
            self.path(step).resolve(), args=self._args.StandardRestore(self._views())
        )
        with torch.no_grad():
            for name, tensor in self.subject.tensors().items():
                tensor.copy_(torch.from_numpy(found[name]))

    def close(self) -> None:
        """Stop the threads."""
        self._checkpointer.close()

    def _views(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self.subject.tensors().items()}
