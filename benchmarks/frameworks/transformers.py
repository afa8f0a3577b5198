"""Hugging Face's Trainer: its own folders, and `attach`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from holdfast.adapters.transformers import attach

from .contract import BATCH, WIDTH, Blocked, Method, Training


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 100 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"rows": torch.ones(WIDTH)}


class _Model(torch.nn.Module):
    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(rows).square().mean()}


def _train(training: Training, blocked: Blocked, *, is_attached: bool) -> None:
    class Timed(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            blocked.timed(super()._save_checkpoint)(*args, **kwargs)

    arguments = TrainingArguments(
        str(training.folder),
        max_steps=training.steps,
        save_steps=training.every,
        save_total_limit=2,
        per_device_train_batch_size=BATCH,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Timed(_Model(training.make_model()), arguments, train_dataset=_Rows())
    if is_attached:
        attach(trainer, folders=False, quiet=True)
    trainer.train()


METHODS: dict[str, Method] = {
    "Trainer": partial(_train, is_attached=False),
    "Trainer, attached": partial(_train, is_attached=True),
}
