"""A training loop as Nebula's users write it; argv: the last step, and after which step to fall dead.

Where checkpoints go is told by the environment. Prints the weights' sum at the end.
"""

import os
import signal
import sys

import torch

import holdfast.adapters.nebula as nm

last, dies = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
start = 0

nm.init()
latest = nm.get_latest_checkpoint()
if latest is not None and latest.tag != "":
    model.load_state_dict(latest.load("model", map_location="cpu"))
    state = latest.load("state")
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
print("start", start, flush=True)

for step in range(start + 1, last + 1):
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    checkpoint = nm.Checkpoint(f"global_step{step}", 2)
    checkpoint.save("model", model.state_dict())
    checkpoint.save("state", {"optimizer": optimizer.state_dict(), "step": step})
    if step == dies:
        os.kill(os.getpid(), signal.SIGKILL)
print("weights", float(model.weight.double().sum()).hex(), flush=True)
