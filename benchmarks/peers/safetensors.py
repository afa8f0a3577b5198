"""`safetensors.torch.save_file` into one file."""

from __future__ import annotations

import torch

from .contract import Peer, Pending


class Safetensors(Peer):
    """All tensors flat by name; tied ones once, since the format refuses shared memory."""

    title = "safetensors save_file"
    module = "safetensors"
    syncs = False
    overlaps = False

    def open(self) -> None:
        """Nothing to start."""

    def save(self, step: int) -> Pending:
        """Save all tensors."""
        from safetensors.torch import save_file

        save_file(self.subject.tensors(), self.path(step))
        return Pending()

    def load(self, step: int) -> None:
        """Load all tensors and copy them into the live ones."""
        from safetensors import safe_open

        with torch.no_grad(), safe_open(self.path(step), "pt", device=str(self.subject.device)) as file:
            for name, live in self.subject.tensors().items():
                live.copy_(file.get_tensor(name))

    def close(self) -> None:
        """Nothing to stop."""
