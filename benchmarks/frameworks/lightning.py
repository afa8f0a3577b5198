"""Lightning: ModelCheckpoint, the same with AsyncCheckpointIO, and HoldfastCheckpoint."""

# Lightning is not in every environment.
# pyright: reportMissingImports=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from holdfast.adapters.lightning import HoldfastCheckpoint

from .contract import BATCH, WIDTH, Blocked, Method, Training


class _Module(LightningModule):
    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _train(training: Training, blocked: Blocked, *, callback: Any, plugin: Any = None) -> None:
    class Timed(Trainer):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            blocked.timed(super().save_checkpoint)(*args, **kwargs)

    trainer = Timed(
        max_epochs=1,
        limit_train_batches=training.steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=training.folder,
        plugins=[plugin()] if plugin else [],
        callbacks=[callback(dirpath=training.folder / "ckpt", every_n_train_steps=training.every)],
    )
    rows: Any = torch.ones(training.steps * BATCH, WIDTH)
    trainer.fit(_Module(training.make_model()), torch.utils.data.DataLoader(rows, batch_size=BATCH))


METHODS: dict[str, Method] = {
    "ModelCheckpoint": partial(_train, callback=ModelCheckpoint),
    "ModelCheckpoint, AsyncCheckpointIO": partial(_train, callback=ModelCheckpoint, plugin=AsyncCheckpointIO),
    "HoldfastCheckpoint": partial(_train, callback=HoldfastCheckpoint),
}
