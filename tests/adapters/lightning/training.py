"""Training with Lightning that tests kill and resume: `python training.py FOLDER PLAN`, a plan in JSON.

The data is shuffled, and augmented with the generators of python, numpy and torch; the model has dropout. The
end of the run is printed: a digest of everything it did, the loss of each batch, and the names of its files.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adapters.digest import digest
from holdfast.adapters.lightning import HoldfastCheckpoint
from holdfast.train.data import GlobalBatches

BATCH, NUM_BATCHES = 4, 7
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
PLAN: dict[str, Any] = {
    **{"data": "map", "every": None, "max_steps": -1, "top_k": 1, "accumulate": 1, "val_interval": 1.0},
    "begin": None,  # callback of epochs that begin: "accumulation" or "averaging"
    # The batch of the run, or the number of another place in this start, where `rank` gets the signal.
    **{"kill_at": 0, "where": "start", "signal": int(signal.SIGKILL), "rank": 0, "to_group": False},
    "is_saved": False,  # kill after the last save
    "slow_from": 0,  # batch for whose samples this start waits for ever
    "env": {},  # variables that have a process killed at a failpoint
    **json.loads(sys.argv[2]),
}
if WORLD > 1:
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # Lightning then takes the ranks of the launcher
os.environ |= {"PYTHONWARNINGS": "ignore", "HOLDFAST_PREEMPTION": "none", **PLAN["env"]}
warnings.simplefilter("ignore")
pl: Any = importlib.import_module("lightning.pytorch")


class Augmented(Dataset[torch.Tensor]):
    """Samples that are changed by all three generators when they are read."""

    def __len__(self) -> int:
        return BATCH * NUM_BATCHES * WORLD

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(numpy.random.rand()) + torch.rand(6)
        return torch.full((6,), float(index)) / len(self) + 0.1 * noise


class Numbered(Augmented):
    """The same samples, each with its index, as many for any number of ranks."""

    def __len__(self) -> int:
        return 56

    def __getitem__(self, index: int) -> Any:
        return index, super().__getitem__(index)


class Stream(IterableDataset[torch.Tensor]):
    """The same samples without a length, so that Lightning fetches one batch ahead."""

    def __iter__(self) -> Any:
        inner = Augmented()
        yield from (inner[int(i)] for i in torch.randperm(len(inner)))


class Slow(Dataset[torch.Tensor]):
    """Samples without random numbers. From a batch on, this start waits for them for ever."""

    def __len__(self) -> int:
        return BATCH * NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if 0 < PLAN["slow_from"] <= index // BATCH:
            time.sleep(10**6)
        return torch.full((6,), float(index)) / len(self)


class SlowStream(IterableDataset[torch.Tensor]):
    """The same samples without a length."""

    def __iter__(self) -> Any:
        yield from (Slow()[index] for index in range(len(Slow())))


class Model(pl.LightningModule):
    """Small model with dropout and batch normalization, whose loss is printed after each batch."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self._log = log

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, list):
            indices, batch = batch
            with self._log.with_name(self._log.name.replace("log", "samples")).open("a") as out:
                out.write(f"{self.current_epoch} {batch_idx} {' '.join(map(str, indices.tolist()))}\n")
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        with self._log.open("a") as out:
            facts = (self.trainer.global_rank, self.current_epoch, batch_idx, self.trainer.global_step)
            out.write(f"{facts} {loss.item().hex()}\n")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """After all callbacks: nothing asks for notices before the next batch is read."""
        if PLAN["slow_from"] and self.global_step == PLAN["slow_from"] - (PLAN["data"] == "slow-stream"):
            os.kill(os.getpid(), signal.SIGTERM)
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", (self.net(batch) - batch.sum(1, keepdim=True)).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    def train_dataloader(self) -> Any:
        kind, accumulate = PLAN["data"], PLAN["accumulate"]
        if kind.startswith("slow"):
            return DataLoader(Slow() if kind == "slow" else SlowStream(), batch_size=BATCH, num_workers=1)
        if kind == "stream":
            return DataLoader(Stream(), batch_size=BATCH)
        if kind == "in-order":
            return DataLoader(Numbered(), batch_size=BATCH)
        if kind in ("global", "global-workers", "global-stateful"):
            batches = GlobalBatches(56, 8 * accumulate, accumulation_steps=accumulate)
            num_workers = 2 if kind == "global-workers" else 0
            if kind == "global-stateful":
                from torchdata.stateful_dataloader import StatefulDataLoader

                return StatefulDataLoader(Numbered(), batch_sampler=batches)
            return DataLoader(Numbered(), batch_sampler=batches, num_workers=num_workers)
        if kind == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(Augmented(), batch_size=BATCH, shuffle=True)
        generator = torch.Generator().manual_seed(5) if kind == "own-generator" else None
        workers = 2 if kind == "workers" else 0
        return DataLoader(
            Augmented(), batch_size=BATCH, shuffle=True, generator=generator, num_workers=workers
        )

    def val_dataloader(self) -> Any:
        return DataLoader(Augmented(), batch_size=BATCH)


class KillAt(pl.Callback):
    """Kills this process at a place of the plan, or sends itself or all processes a signal."""

    def __init__(self) -> None:
        self._num_reached = 0

    def _reach(self, where: str, number: int | None = None) -> None:
        if PLAN["rank"] != RANK or where != ("training" if PLAN["is_saved"] else PLAN["where"]):
            return
        self._num_reached += 1
        if PLAN["is_saved"] or PLAN["kill_at"] == (number or self._num_reached):
            os.kill(0 if PLAN["to_group"] else os.getpid(), PLAN["signal"])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._reach("start", trainer.current_epoch * NUM_BATCHES + batch_idx + 1)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._reach("end", trainer.current_epoch * NUM_BATCHES + batch_idx + 1)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._reach("validation")

    def on_train_epoch_end(self, *_: Any) -> None:
        self._reach("epoch")

    def on_train_end(self, *_: Any) -> None:
        self._reach("training")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(0)
    checkpoint = HoldfastCheckpoint(
        dirpath=folder / "ckpt",
        save_last=True,
        save_top_k=PLAN["top_k"],
        every_n_train_steps=PLAN["every"],
        monitor="val" if PLAN["top_k"] > 1 else None,
    )
    of_epochs = {
        "accumulation": lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})],
        "averaging": lambda: [pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
    }
    others = of_epochs[PLAN["begin"]]() if PLAN["begin"] else []
    trainer = pl.Trainer(
        max_epochs=3,
        max_steps=PLAN["max_steps"],
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        accumulate_grad_batches=PLAN["accumulate"],
        val_check_interval=PLAN["val_interval"],
        callbacks=[KillAt(), *others, checkpoint],
    )
    log = folder / f"log{RANK}"
    model = Model(log)
    trainer.fit(model, ckpt_path="last")
    state = {**model.state_dict(), "rng": [torch.rand(2), random.random(), float(numpy.random.rand())]}
    end = {
        "digest": digest(state),
        # The last loss counts of a batch that was trained again.
        "losses": dict(line.rsplit(" ", 1) for line in log.read_text().splitlines()),
        "files": sorted(path.name for path in (folder / "ckpt").iterdir()),
        "step": trainer.global_step,
    }
    print(json.dumps(end))


if __name__ == "__main__":
    main()
