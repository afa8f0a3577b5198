"""Lightning: one line saves in the background, and a killed training resumes exactly.

Run it, kill it at any moment, and run it again. It ends with the same hash of the weights.

    pip install 'torch-holdfast[lightning]'
    python examples/06_lightning.py
"""

import hashlib
import sys

import torch
from lightning.pytorch import (  # pyright: ignore[reportMissingImports] - an extra
    LightningModule,
    Trainer,
    seed_everything,
)
from torch.utils.data import DataLoader, TensorDataset

from holdfast.adapters.lightning import HoldfastCheckpoint


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
seed_everything(0)
x = torch.randn(4096, 8)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = Regression()

trainer = Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=1,
    logger=False,
    callbacks=[HoldfastCheckpoint(dirpath=folder, every_n_train_steps=100, save_last=True)],
)
trainer.fit(model, data, ckpt_path="last")

weights = b"".join(one.numpy().tobytes() for one in model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest()[:16])
