"""Training of the gallery, a small model with one trouble: `python train.py TROUBLE STEPS`."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

import holdfast
from holdfast.train.data import GlobalBatches

TROUBLE, STEPS = sys.argv[1], int(sys.argv[2])
RANK = int(os.environ.get("RANK", "0"))
WATCHES = {
    "hang": [holdfast.Hang(limit="10s", first="15s")],
    "slow": [holdfast.SlowRanks(window="2s")],
    "spike": [holdfast.Spike("rollback")],
}


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, which the second rank gets from a disk that is slow, or stops to answer."""

    num_read = 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        if TROUBLE == "hang" and RANK == 1 and self.num_read > 120:
            time.sleep(3600)
        if TROUBLE == "slow" and RANK == 1:
            time.sleep(0.02)
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


def main() -> None:
    """Train, and leave the trouble to Holdfast."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    )
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Samples()
    batches = GlobalBatches(len(data), 8)
    stream = iter(torch.utils.data.DataLoader(data, batch_sampler=batches))
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    watches = WATCHES.get(TROUBLE, [])
    with holdfast.Checkpointer("runs/gpt", state, every=20, watches=watches) as ckpt:
        for step in ckpt.steps(STEPS):
            is_bad = TROUBLE == "spike" and 1200 <= batches.position < 1224
            loss = (model(next(stream)) - (1000.0 if is_bad else 0.5)).square().mean() + 1
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.record(loss=loss)
            if (step + 1) % 100 == 0 and RANK == 0:
                sys.stderr.write(f"step {step + 1}: loss {loss.item():.3f}\n")
            time.sleep(0.0 if TROUBLE == "slow" else 0.02)
    if dist.is_initialized():
        dist.destroy_process_group()
    holdfast.hard_exit(0)


if __name__ == "__main__":
    main()
