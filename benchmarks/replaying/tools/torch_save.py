"""`torch.save` every few steps, to a temporary file that is fsynced and renamed."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .contract import HandWritten, remove


class TorchSave(HandWritten):
    """Rank 0 saves while all wait, and every rank loads the file."""

    title = "torch.save"

    def save(self, step: int) -> None:
        """Write, fsync and rename."""
        if self.training.rank != 0:
            return
        path = self.training.home / "writing"
        try:
            with path.open("wb") as file:
                torch.save(self.training.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            remove(path)
            raise
        self.publish(path, step)

    def load(self, path: Path) -> None:
        """Load both state dicts."""
        state = torch.load(path, weights_only=True)
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])
