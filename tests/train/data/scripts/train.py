"""Training on several ranks that appends the samples of each step to a file, and may kill itself.

python train.py HOME LOG TOTAL NUM_WORKERS KILL_AT
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.train.data import GlobalBatches

home, log = Path(sys.argv[1]), Path(sys.argv[2])
total, num_workers, kill_at = map(int, sys.argv[3:])
dist.init_process_group("gloo")
data = TensorDataset(torch.arange(100))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
batches = GlobalBatches(len(data), 12, accumulation_steps=2)
loader = DataLoader(data, batch_sampler=batches, num_workers=num_workers)
state = {"model": model, "optimizer": optimizer, "batches": batches}
ckpt = holdfast.Checkpointer(
    home, state, every=3, quiet=True, watches=[holdfast.Preemption("none", signals=False)]
)
stream = itertools.chain.from_iterable(loader for _ in itertools.count())
for step in ckpt.steps(total):
    if step == kill_at and dist.get_rank() == 0:
        ckpt.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    samples = [index for _ in range(2) for index in next(stream)[0].tolist()]
    with log.open("a") as out:
        out.write(f"{step} {' '.join(map(str, samples))}\n")
    model(torch.tensor([[float(sum(samples))]])).sum().backward()
    optimizer.step()
ckpt.close()
holdfast.hard_exit(0)
