"""The batch that `holdfast.fit_batch` finds, compared with trying sizes until memory really runs out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parents[2] / "src")]

import torch  # noqa: E402 - the folders above are not packages
from memory import peak_tensor_bytes  # noqa: E402
from states import Gpt2, Shape, randomize  # noqa: E402

import holdfast  # noqa: E402

SHAPES = {"cuda": Shape(layers=6, width=512, heads=8, vocabulary=8192), "cpu": Shape(2, 64, 2, 256, 32)}
LIMITS = {"cuda": 8 << 30, "cpu": 64 << 20}
LENGTHS = {"cuda": 512, "cpu": 32}
MAX_SIZE = 4096


def main() -> int:
    """Search both ways; the exit status is 1 if the sizes differ by more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    limit = LIMITS[device.type]
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)  # beyond it the allocator raises
    training = _Training(device)
    step, sample, state = training.step, training.sample, training.state
    began_s = time.perf_counter()
    fit = holdfast.fit_batch(step, sample, state, memory_limit=limit, max_size=MAX_SIZE, quiet=True)
    fit_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    largest = _largest(lambda size: training.fits(size, limit))
    found = {
        "limit_bytes": limit,
        "fitted": fit.largest,
        "fit_s": fit_s,
        "exhaustive": largest,
        "exhaustive_s": time.perf_counter() - began_s,
        "share": fit.largest / largest,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return int(not 0.95 <= found["share"] <= 1.0)


class _Training:
    """A small GPT and its steps."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        shape = SHAPES[device.type]
        with device:
            self._model = Gpt2(shape)
            randomize(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._device = device
        self.sample = torch.randint(shape.vocabulary, (2, LENGTHS[device.type]), device=device)
        self.state: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}

    def step(self, batch: Any) -> None:
        """Train on a batch."""
        self._model(batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def fits(self, size: int, limit: int) -> bool:
        """True if two steps on a batch of `size` succeed within the limit."""
        batch = self.sample[:1].expand(size, -1).contiguous()
        if self._device.type == "cpu":  # memory does not run out here: tensors are counted, as fit_batch does
            self.step(batch)  # makes the optimizer's state
            held = 3 * sum(one.numel() * one.element_size() for one in self._model.parameters())
            return held + peak_tensor_bytes(lambda: self.step(batch), self._device) <= limit
        try:
            for _ in range(2):
                self.step(batch)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        finally:
            self._optimizer.zero_grad()
            torch.cuda.empty_cache()
        return True


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, by doubling and halving."""
    low = 1
    while low < MAX_SIZE and fits(2 * low):
        low *= 2
    high = 2 * low  # does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


if __name__ == "__main__":
    sys.exit(main())
