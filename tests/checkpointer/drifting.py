"""Training on several gloo ranks, one of which changes a bit of its copy: run by the tests of replicas."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import holdfast
from holdfast import Preemption


@dataclass(frozen=True)
class Flip:
    """One flipped bit of one rank, before the save of a step; in a weight, a moment or a buffer."""

    rank: int
    what: str = "weight"
    step: int = 6


class Net(nn.Module):
    """A net with batch norm, tied weights and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.back = nn.Linear(256, 64, bias=False)
        self.again = nn.Linear(256, 64, bias=False)
        self.again.weight = self.back.weight
        self.table = nn.Buffer(torch.linspace(0, 1, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.body(x))) * self.table
        return self.back(hidden) + self.again(hidden)


class LowRank(nn.Module):
    """LoRA: a frozen weight and a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, 64) / 8)
        self.up = nn.Parameter(torch.zeros(256, 4))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def _lora(net: Net) -> None:
    net.requires_grad_(False)
    parametrize.register_parametrization(net.body, "weight", LowRank())


KINDS: dict[str, Callable[[Net], object]] = {
    "plain": lambda _: None,
    "accumulated": lambda _: None,
    "unbroadcast": lambda _: None,
    "frozen": lambda net: net.body.requires_grad_(False),
    "lora": _lora,
    "bf16": lambda net: net.to(torch.bfloat16),
}


def flip_bit(tensor: torch.Tensor) -> None:
    """Flip one bit of one element, as failing memory does: without PyTorch, so without a version counter."""
    tensor.detach().view(-1).view(torch.uint8).numpy()[8] ^= 1 << 3


def train(rank: int, home: Path, kind: str, flip: Flip | None, num_steps: int = 16) -> list[str]:
    """Train with DDP, with a save at every second step; return the warnings."""
    torch.manual_seed(0)
    net = Net()
    KINDS[kind](net)
    broadcast: dict[str, Any] = {"broadcast_buffers": False} if kind == "unbroadcast" else {}
    ddp = DistributedDataParallel(net, **broadcast)  # the option is deprecated in torch 2.13
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    dtype = next(net.parameters()).dtype
    micro_batches = 3 if kind == "accumulated" else 1

    def step_once() -> None:
        optimizer.zero_grad()
        for number in range(micro_batches):
            x = torch.randn(16, 64, generator=data).to(dtype)
            is_last = number == micro_batches - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                ddp(x).square().mean().backward()
        optimizer.step()

    targets: dict[str, Callable[[], torch.Tensor]] = {
        "weight": lambda: net.back.weight,
        "moment": lambda: optimizer.state[net.back.weight]["exp_avg"],
        "buffer": lambda: net.table,
    }
    return _loop(home, {"net": ddp, "optimizer": optimizer}, flip, num_steps, targets, step_once)


def _loop(
    home: Path,
    state: dict[str, object],
    flip: Flip | None,
    num_steps: int,
    targets: dict[str, Callable[[], torch.Tensor]],
    step_once: Callable[[], None],
) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        watches = [Preemption("none", signals=False), holdfast.CompileCache("off")]
        options: dict[str, Any] = {"keep": None, "quiet": True, "memory": "64MiB", "watches": watches}
        ckpt = holdfast.Checkpointer(home, state, every=2, **options)
        for step in ckpt.steps(num_steps):
            step_once()
            ckpt.wait()  # saves that are made at once may be committed in another order
            if flip is not None and (dist.get_rank(), step + 1) == (flip.rank, flip.step):
                flip_bit(targets[flip.what]())
    kinds = holdfast.SaveWarning, holdfast.WatchWarning
    return [str(one.message) for one in found if issubclass(one.category, kinds)]


def train_hsdp(rank: int, home: Path, flip: Flip | None, num_steps: int = 12) -> list[str]:
    """Train on a mesh of 2 x 2, replicated over the first dimension and sharded over the second."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)

    def step_once() -> None:
        optimizer.zero_grad()
        net(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()

    weight: Any = net[0].weight  # a DTensor
    targets = {
        "weight": lambda: weight.to_local(),
        "moment": lambda: optimizer.state[weight]["exp_avg"].to_local(),
    }
    return _loop(home, {"net": net, "optimizer": optimizer}, flip, num_steps, targets, step_once)
