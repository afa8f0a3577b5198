"""Data-parallel training on several ranks; the next start may have more or fewer of them.

torchrun --nproc-per-node 2 examples/02_ddp.py [HOME [STEPS]]
python examples/02_ddp.py [HOME [STEPS]]          # the same run, on one rank
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import holdfast

home = sys.argv[1] if len(sys.argv) > 1 else "runs/ddp"
total = int(sys.argv[2]) if len(sys.argv) > 2 else 300

torch.set_num_threads(1)
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")  # before the Checkpointer, which asks it who the ranks are
rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
net = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
optimizer = torch.optim.AdamW(net.parameters())
torch.manual_seed(1 + rank)  # every rank draws its own batches; Holdfast keeps each rank's generator

ckpt = holdfast.Checkpointer(home, {"model": net, "optimizer": optimizer}, every=50)
for step in ckpt.steps(total):
    inputs = torch.randn(64 // world_size, 64)
    loss = (net(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {step + 1} on {world_size} ranks: loss {loss.item():.4f}", flush=True)

ckpt.close()  # every rank's part is durable
if rank == 0:
    print("done", flush=True)
holdfast.hard_exit(0)  # a finished gloo process may otherwise be aborted by its own threads
