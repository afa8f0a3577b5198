"""Holdfast itself."""

from __future__ import annotations

import shutil
from typing import Any

from .contract import Peer, Pending


class Holdfast(Peer):
    """`holdfast.Checkpointer` on a local home, with memory for one save in flight."""

    title = "holdfast"
    module = "holdfast"
    syncs = True
    overlaps = True

    def open(self) -> None:
        """Start the checkpointer."""
        import holdfast

        state: dict[str, Any] = {"model": self.subject.model}
        if self.subject.optimizer is not None:
            state["optimizer"] = self.subject.optimizer
        memory_bytes = int(1.1 * self.subject.num_bytes) + (64 << 20)
        self._checkpointer = holdfast.Checkpointer(
            self.directory / "home", state, every=10**9, keep=None, memory=memory_bytes
        )

    def prepare(self) -> None:
        """Search for a checkpoint, as every start of a training does, and prepare the first save."""
        self._checkpointer.restore()
        self._checkpointer.prepare()

    def save(self, step: int) -> Pending:
        """Save; parameters and moments are copied while the next step runs."""
        save = self._checkpointer.save(step)
        return Pending(save.wait_staged, save.wait_durable)

    def load(self, step: int) -> None:
        """Restore the newest checkpoint, every byte verified."""
        found = self._checkpointer.restore()
        if found != step:
            raise RuntimeError(f"restored step {found}, expected {step}")

    def settle(self) -> None:
        """Wait for the keeper."""
        self._checkpointer.wait()

    def delete(self, step: int) -> None:
        """Remove one checkpoint, as the other peers do, between measurements."""
        shutil.rmtree(self.directory / "home" / f"step-{step:08d}")

    def close(self) -> None:
        """Stop the checkpointer and its keeper."""
        self._checkpointer.close()
