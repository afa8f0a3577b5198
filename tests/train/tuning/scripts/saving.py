"""A training that restores from its home, saves after every step, and writes a file at its end."""

import sys
from pathlib import Path

import torch

import holdfast

home, ended = sys.argv[1:]
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = None
try:
    with holdfast.Checkpointer(home, {"model": model, "optimizer": optimizer}, every=1) as checkpointer:
        for _ in checkpointer.steps(1000):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save(model.state_dict(), f"{home}/model.pt")
            torch.load(f"{home}/model.pt")
finally:
    Path(ended).write_text(f"restored {checkpointer and checkpointer.latest_step()}")
