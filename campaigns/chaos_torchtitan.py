"""Target of ckpt-chaos: torchtitan's containers with FSDP2, and its checkpoint manager or Holdfast's."""

# torchtitan is not in every environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from campaigns.chaos_phases import LAST_STEP, SAVE_EVERY, is_stock, run_phase


class _Data:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Training:
    """Training with the attributes that torchtitan's trainer has for its checkpoint manager."""

    def __init__(self, out: Path) -> None:
        from holdfast.adapters.torchtitan import HoldfastCheckpointManager

        torch.manual_seed(0)
        self.step = 0
        self._model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        fully_shard(self._model)
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
        config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
        self._optimizers = OptimizersContainer(config, model_parts=[self._model])
        self._schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self._optimizers, training_steps=LAST_STEP
        )
        manager: Any = CheckpointManager if is_stock() else HoldfastCheckpointManager
        self._checkpointer = manager.Config(enable=True, folder="checkpoint", interval=SAVE_EVERY).build(
            dataloader=_Data(),
            model_parts=[self._model],
            optimizers=self._optimizers,
            lr_schedulers=self._schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(out),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def load(self) -> None:
        """Load the newest checkpoint."""
        if not self._checkpointer.load():
            raise FileNotFoundError("no checkpoint was found")

    def train_step(self) -> None:
        """Train one step."""
        self.step += 1
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))
        self._optimizers.zero_grad()
        (self._model(batch) - batch.flip(1)).square().mean().backward()
        self._checkpointer.maybe_wait_for_staging()
        self._optimizers.step()
        self._schedulers.step()

    def save(self) -> None:
        """Save the present step."""
        self._checkpointer.save(self.step, last_step=self.step == LAST_STEP)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole weights."""
        state = self._model.state_dict()
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}

    def close(self) -> None:
        """Wait for saves."""
        self._checkpointer.close()


def newest_stock(out: Path, healthy: object) -> int:
    """Return the newest step that has DCP's metadata, which is written last; 0 without one."""
    found = (
        re.fullmatch(r"step-(\d+)", path.parent.name) for path in out.glob("checkpoint/step-*/.metadata")
    )
    return max((int(match[1]) for match in found if match), default=0)


if __name__ == "__main__":
    run_phase(_Training)
