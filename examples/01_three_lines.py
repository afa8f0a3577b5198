"""A training loop with Holdfast in it: run it, kill it whenever you like, run it again.

python examples/01_three_lines.py [HOME]
"""

import hashlib
import sys

import torch
from torch import nn

import holdfast

home = sys.argv[1] if len(sys.argv) > 1 else "runs/first"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters())

state = {"model": model, "optimizer": optimizer}
with holdfast.Checkpointer(home, state, every=100) as ckpt:
    for step in ckpt.steps(1000):  # resumes where the run stopped
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
print(f"done; the weights' sha256 is {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}")
