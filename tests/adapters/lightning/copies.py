"""Training with one save whose copy is held; argv: folder, what is written to after the save.

With the environment variables of a launcher it trains on several ranks. As a script, prints a JSON object:
the warnings of this rank, and whether the copy was held while training continued.
"""

# Pyright takes the folder of these tests for the package.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.adapters.lightning import HoldfastCheckpoint
from holdfast.errors import SaveWarning
from stage.training import WAIT_S, CopyGate

pl: Any = importlib.import_module("lightning.pytorch")
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WIDTH = 128  # weights of as many columns are large enough to be copied beside training
SAVED = 2  # the step that is saved
ROWS: Any = torch.ones(5, WIDTH)


def clone(value: Any) -> Any:
    """Return a copy of nested dictionaries and lists of tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(one) for key, one in value.items()}
    return [clone(one) for one in value] if isinstance(value, (list, tuple)) else value


class Model(pl.LightningModule):
    """A model that may write to its weights or to its optimizer's state after a save."""

    def __init__(self, gate: CopyGate, spoil: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.states: dict[int, tuple[Any, Any]] = {}  # weights and optimizer by step
        self._gate, self._spoil = gate, spoil
        self.was_held = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        if self.trainer.global_step == SAVED and RANK == 0:  # training continues while the copy is held
            self.was_held = self._gate.reached.wait(WAIT_S) and not self._gate.opened.is_set()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Runs after the callbacks, so after the save."""
        moment = self.trainer.optimizers[0].state[self.layer.weight]["exp_avg"]
        if self.trainer.global_step == SAVED and self._spoil:
            with torch.no_grad():
                {"weights": self.layer.weight, "moments": moment}[self._spoil].zero_()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(ROWS, batch_size=1)


class Recorder(pl.Callback):
    """Records the state before each save, and opens the gate at the step after it."""

    def __init__(self, gate: CopyGate) -> None:
        self._gate = gate

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.states[trainer.global_step] = clone((module.state_dict(), trainer.optimizers[0].state_dict()))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == SAVED:
            self._gate.opened.set()

    def on_train_end(self, *_: Any) -> None:
        self._gate.opened.set()


def play(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: str, steps: int = 4
) -> tuple[Model, Any, list[str]]:
    """Train with one save, and return the model, the content of its file, and the warnings."""
    gate = CopyGate(monkeypatch)
    torch.manual_seed(0)
    model = Model(gate, spoil)
    callback = HoldfastCheckpoint(
        dirpath=folder / "ckpt", every_n_train_steps=SAVED, save_top_k=-1, save_last=True
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Recorder(gate), callback],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model)
    said = [str(one.message) for one in caught if issubclass(one.category, SaveWarning)]
    return model, callback, said


def main() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        model, _, said = play(Path(sys.argv[1]), monkeypatch, sys.argv[2], steps=4)
    print(json.dumps({"said": said, "was_held": model.was_held}))


if __name__ == "__main__":
    main()
