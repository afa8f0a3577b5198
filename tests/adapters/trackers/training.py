"""A small training that logs each step: `python training.py LIBRARY HOME FOLDER STEPS [HALT_AT]`.

The loss of a step depends on the attempt, so a value that was logged twice would show. At HALT_AT it waits to
be killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.adapters import trackers


def attach(library: str, ckpt: holdfast.Checkpointer, folder: Path) -> trackers.Tracker:
    """Return a tracker that stores all it receives in a folder."""
    if library == "mlflow":
        return trackers.attach_mlflow(ckpt, tracking_uri=folder.as_uri(), params={"lr": 0.1})
    if library == "wandb":
        return trackers.attach_wandb(ckpt, folder, project="test", mode="offline")
    return trackers.attach_tensorboard(ckpt, folder)


def main() -> None:
    """Train from where the run stopped."""
    library, home, folder, steps, *halt = sys.argv[1:]
    model = torch.nn.Linear(2, 1)
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}
    ckpt = holdfast.Checkpointer(home, state, every=10, watches=[holdfast.CompileCache("off")])
    with ckpt, attach(library, ckpt, Path(folder)) as tracker:
        for step in ckpt.steps(int(steps)):
            loss = model(torch.ones(2)).square().sum()
            loss.backward()
            state["optimizer"].step()
            if halt and step == int(halt[0]):
                ckpt.wait()
                signal.pause()
            tracker.log({"loss": step + 1000 * (ckpt.attempt or 0)}, step=step)


if __name__ == "__main__":
    main()
