"""A loop with Hugging Face Accelerate: its own folders, and `attach`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from holdfast.adapters.accelerate import attach

from .contract import Blocked, Method, Training


def _train(training: Training, blocked: Blocked, *, is_attached: bool) -> None:
    config = ProjectConfiguration(str(training.folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator: Any = Accelerator(cpu=True, project_config=config)
    if is_attached:
        attach(accelerator, quiet=True)
    model = training.make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    save = blocked.timed(accelerator.save_state)
    for step in range(1, training.steps + 1):
        accelerator.backward(model(training.make_batch()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % training.every == 0:
            save()
    accelerator.end_training()


METHODS: dict[str, Method] = {
    "save_state": partial(_train, is_attached=False),
    "save_state, attached": partial(_train, is_attached=True),
}
