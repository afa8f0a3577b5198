"""Training with Lightning that tests kill and resume; prints a digest of everything it did.

The data is shuffled, and augmented with the generators of python, numpy and torch; the model has dropout.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.adapters.lightning import HoldfastCheckpoint
from holdfast.train.data import GlobalBatches

pl: Any = importlib.import_module("lightning.pytorch")

BATCH, NUM_BATCHES = 4, 7
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


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
        if 0 < ARGS.slow_from <= index // BATCH:
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
        if ARGS.slow_from and self.global_step == ARGS.slow_from - (ARGS.data == "slow-stream"):
            os.kill(os.getpid(), signal.SIGTERM)
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", (self.net(batch) - batch.sum(1, keepdim=True)).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    def train_dataloader(self) -> Any:
        kind = ARGS.data
        if kind.startswith("slow"):
            return DataLoader(Slow() if kind == "slow" else SlowStream(), batch_size=BATCH, num_workers=1)
        if kind == "stream":
            return DataLoader(Stream(), batch_size=BATCH)
        if ARGS.data == "in-order":
            return DataLoader(Numbered(), batch_size=BATCH)
        if kind in ("global", "global-workers", "global-stateful"):
            batches = GlobalBatches(56, 8 * ARGS.accumulate, accumulation_steps=ARGS.accumulate)
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
    """Kills this process after some batches of this start, or sends itself or all processes a signal."""

    def __init__(self, count: int, number: int, where: str) -> None:
        self._left, self._number, self._where = count, number, where

    def _hit(self, where: str) -> None:
        if where == self._where:
            self._left -= 1
            if not self._left:
                os.kill(0 if ARGS.to == "group" else os.getpid(), self._number)

    def on_train_batch_start(self, *_: Any) -> None:
        self._hit("start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._hit("end")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._hit("validation")

    def on_train_epoch_end(self, *_: Any) -> None:
        self._hit("epoch")

    def on_train_end(self, *_: Any) -> None:
        self._hit("training")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default="map")
    parser.add_argument("--every", type=int)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--where", default="start")
    parser.add_argument("--signal", type=int, default=int(signal.SIGKILL))
    parser.add_argument("--to", choices=["process", "group"], default="process")
    parser.add_argument("--slow-from", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--val-interval", type=float, default=1.0)
    parser.add_argument(
        "--begin", choices=["accumulation", "averaging"], help="callback of epochs that begin"
    )
    parser.add_argument("--stock", action="store_true")
    return parser.parse_args()


def main() -> None:
    folder: Path = ARGS.folder
    folder.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(0)
    checkpoint_type = pl.callbacks.ModelCheckpoint if ARGS.stock else HoldfastCheckpoint
    checkpoint = checkpoint_type(
        dirpath=folder / "ckpt",
        save_last=True,
        save_top_k=ARGS.top_k,
        every_n_train_steps=ARGS.every,
        monitor="val" if ARGS.top_k > 1 else None,
    )
    of_epochs = {
        "accumulation": lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})],
        "averaging": lambda: [pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
    }
    others = of_epochs[ARGS.begin]() if ARGS.begin else []
    trainer = pl.Trainer(
        max_epochs=ARGS.epochs,
        max_steps=ARGS.max_steps,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        accumulate_grad_batches=ARGS.accumulate,
        val_check_interval=ARGS.val_interval,
        callbacks=[KillAt(ARGS.kill_at, ARGS.signal, ARGS.where), *others, checkpoint],
    )
    model = Model(folder / f"log{os.environ.get('RANK', '0')}")
    trainer.fit(model, ckpt_path="last")
    state = {name: one.tolist() for name, one in model.state_dict().items()}
    state["rng"] = [torch.rand(2).tolist(), random.random(), float(numpy.random.rand())]
    print("DIGEST", hashlib.sha256(repr(state).encode()).hexdigest())


ARGS = parse()

if __name__ == "__main__":
    sys.exit(main())
