"""Images of digits: MNIST where torchvision can get it, otherwise those in scikit-learn's own package."""

from __future__ import annotations

import functools
import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TEST_SHARE = 5  # every fifth of scikit-learn's images is for testing


@dataclass(frozen=True)
class Images:
    """Images and what is on them: (n, 1, side, side) float32 and (n,) int64."""

    pixels: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Some of them, on a device."""
        return self.pixels[rows].to(device), self.targets[rows].to(device)


@dataclass(frozen=True)
class Digits:
    """Images to train on and to test with."""

    train: Images
    test: Images

    @property
    def side(self) -> int:
        """Pixels in a row."""
        return self.train.pixels.shape[-1]

    def batch(
        self, epoch: int, batch: int, args: Namespace, rank: int, ranks: int, device: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's part of a batch. It follows from numbers alone, so nothing of the data is saved."""
        rows = _order(len(self.train), args.seed, epoch)[batch * args.batch :][: args.batch]
        return self.train.take(rows.chunk(ranks)[rank], device)


def load(name: str, folder: Path, side: int) -> Digits:
    """`mnist`, `digits` at so many pixels, or `auto`: MNIST if torchvision has it or can get it."""
    if name == "mnist" or (name == "auto" and importlib.util.find_spec("torchvision")):
        try:
            return _mnist(folder)
        except (OSError, RuntimeError) as problem:
            if name == "mnist":
                raise
            print(f"no MNIST ({problem}): taking scikit-learn's digits", flush=True)
    return _bundled(side)


def _mnist(folder: Path) -> Digits:
    from torchvision.datasets import MNIST  # pyright: ignore[reportMissingImports]

    def images(*, train: bool) -> Images:
        found = MNIST(str(folder), train=train, download=True)
        return Images((found.data[:, None].float() / 255 - 0.1307) / 0.3081, found.targets)

    return Digits(images(train=True), images(train=False))


def _bundled(side: int) -> Digits:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    pixels = torch.from_numpy(found.images).float()[:, None] / 16
    pixels = torch.nn.functional.interpolate(pixels, (side, side))
    pixels = (pixels - pixels.mean()) / pixels.std()
    targets = torch.from_numpy(found.target).long()
    is_test = torch.arange(len(targets)) % TEST_SHARE == 0
    return Digits(Images(pixels[~is_test], targets[~is_test]), Images(pixels[is_test], targets[is_test]))


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """All images in the order of an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
