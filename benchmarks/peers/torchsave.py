"""`torch.save` into one file."""

from __future__ import annotations

from typing import Any

import torch

from .contract import Peer, Pending


class TorchSave(Peer):
    """`torch.save` of the state dicts, as in most training scripts."""

    title = "torch.save"
    module = "torch"
    syncs = False
    overlaps = False

    def open(self) -> None:
        """Nothing to start."""

    def save(self, step: int) -> Pending:
        """Save both state dicts."""
        state: dict[str, Any] = {"model": self.subject.model.state_dict()}
        if self.subject.optimizer is not None:
            state["optimizer"] = self.subject.optimizer.state_dict()
        torch.save(state, self.path(step))
        return Pending()

    def load(self, step: int) -> None:
        """Load both state dicts."""
        state = torch.load(self.path(step), map_location=self.subject.device, weights_only=True)
        self.subject.model.load_state_dict(state["model"])
        if self.subject.optimizer is not None:
            self.subject.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Nothing to stop."""
