"""The training of tests under torchrun: `torchrun torchrun_trainer.py HOME TOTAL [before|after METHOD]`.

Its batches depend on the step alone, and each rank computes the gradient of all of it, so the weights do not
depend on the number of ranks. Each completed step is a line of HOME/../progress.log. With two
last words it also reads a data loader, whose workers start before or after the Checkpointer is made.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def main() -> None:
    home, total = Path(sys.argv[1]), int(sys.argv[2])
    start, method = sys.argv[3:] or ("", "fork")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    net = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(10**5)), num_workers=2, multiprocessing_context=method
    )
    batches = iter(loader) if start == "before" else None
    with holdfast.Checkpointer(home, {"model": net, "optimizer": optimizer}, every=4) as ckpt:
        batches = iter(loader) if start == "after" else batches
        for step in ckpt.steps(total):
            if batches is not None:
                next(batches)
            torch.manual_seed(step)
            optimizer.zero_grad()
            net(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)  # as a step of a greater model would take
            new = home.parent / f"rank-{rank}.pid.new"
            new.write_text(str(os.getpid()))
            new.replace(home.parent / f"rank-{rank}.pid")  # never seen empty
            if rank == 0:
                with (home.parent / "progress.log").open("a") as log:
                    log.write(f"{world_size} {step + 1}\n")
    if rank == 0:
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
        (home.parent / "final.txt").write_text(digest.hexdigest())
    holdfast.hard_exit(0)


if __name__ == "__main__":
    main()
