"""A training with a low-bit optimizer as its own process: `low_bit_trainer.py HOME OPTIMIZER TOTAL FINAL`.

With `--die-at STEP` the process kills itself with SIGKILL after that step. At its end it writes a digest of
its final state to FINAL. The optimizer runs without compiling: that changes its speed, not its state.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import holdfast

WIDTH = 80  # large enough that the weights' state is quantized; that of the biases is not


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of torchao, or the one of the tests."""
    if name == "Momentum":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from wrapped import Momentum

        return Momentum([parameter for parameter in model.parameters() if parameter.dim() > 1], lr=0.01)
    import torchao.optim  # pyright: ignore[reportMissingImports]

    return getattr(torchao.optim, name)(model.parameters(), lr=1e-2)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hash of every tensor that a checkpoint would hold."""
    from holdfast.checkpoint.state import State

    captured = State({"model": model, "optimizer": optimizer}).capture()
    text = hashlib.sha256(repr(captured.values["optimizer"]).encode())
    for name, tensor in sorted(captured.tensors.items()):
        text.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("optimizer")
    parser.add_argument("total", type=int)
    parser.add_argument("final", type=Path)
    parser.add_argument("--die-at", type=int, default=-1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    optimizer = make_optimizer(args.optimizer, model)
    with holdfast.Checkpointer(args.home, {"model": model, "optimizer": optimizer}, every=2) as ckpt:
        for step in ckpt.steps(args.total):
            optimizer.zero_grad()
            model(torch.randn(16, WIDTH)).square().mean().backward()
            optimizer.step()
            if step == args.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    args.final.write_text(digest(model, optimizer))


if __name__ == "__main__":
    main()
