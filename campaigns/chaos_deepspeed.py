"""Target of ckpt-chaos: a DeepSpeed engine with ZeRO 1, attached or not."""

# DeepSpeed is not in every environment, and has no type information.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from campaigns.chaos_phases import is_stock, run_phase


class _Training:
    """Training of one rank."""

    def __init__(self, out: Path) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__.clear()  # else it compiles its own all-reduce first
        torch.manual_seed(0)
        self.step = 0
        self._folder = str(out / "ckpt")
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        parameters: Any = model.parameters()  # deepspeed asks for a module in its annotation
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        }
        deepspeed.init_distributed("gloo")
        self._engine: Any = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
        if not is_stock():
            from holdfast.adapters.deepspeed import attach

            attach(self._engine)

    def load(self) -> None:
        """Load the newest checkpoint."""
        path, client_state = self._engine.load_checkpoint(self._folder)
        if path is None:
            raise FileNotFoundError("no checkpoint was found")
        self.step = client_state["step"]

    def train_step(self) -> None:
        """Train one step."""
        self.step += 1
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))
        self._engine.backward((self._engine(batch) - batch.flip(1)).square().mean())
        self._engine.step()

    def save(self) -> None:
        """Save the present step."""
        self._engine.save_checkpoint(self._folder, client_state={"step": self.step})

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole weights."""
        return dict(self._engine.module.state_dict())

    def close(self) -> None:
        """Wait for saves."""
        self._engine.destroy()


def newest_stock(out: Path, healthy: object) -> int:
    """Return the step of the tag in `latest`, which is written last; 0 without one."""
    try:
        return int((out / "ckpt" / "latest").read_text().removeprefix("global_step"))
    except (OSError, ValueError):
        return 0


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run_phase(_Training)
