"""Trains with random augmentation in a loader and dropout in the model; kills itself after a step."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.train.data import GlobalBatches

NUM_SAMPLES, NUM_STEPS = 24, 14


class RandomFlip:
    """Transform that draws from torch, as those of torchvision do."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.flip(0) if torch.rand(1) < 0.5 else image


class RandomNoise:
    """Transform that draws from numpy and random, as those of albumentations do."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image * random.uniform(0.9, 1.1) + torch.from_numpy(np.random.normal(0, 0.1, 4)).float()


class Images(Dataset[torch.Tensor]):
    """Augmented images."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return RandomNoise()(RandomFlip()(torch.arange(4.0) + index))


def main() -> None:
    """Train up to the last step, or be killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--kill-after", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = GlobalBatches(NUM_SAMPLES, 4, seed=1)
    loader = DataLoader(
        Images(),
        batch_sampler=batches,
        num_workers=args.workers,
        persistent_workers=args.persistent,
        multiprocessing_context="fork" if args.workers else None,
    )
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    with holdfast.Checkpointer(args.home, state, every=4, quiet=True) as ckpt:
        stream = itertools.chain.from_iterable(loader for _ in itertools.count())
        for step in ckpt.steps(NUM_STEPS):
            optimizer.zero_grad()
            model(next(stream)).square().mean().backward()
            optimizer.step()
            if step == args.kill_after:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
