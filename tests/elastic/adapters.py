"""Code of a rank in the tests of frozen parts: a large base that nothing trains, and small adapters."""

from __future__ import annotations

import contextlib
import hashlib
import stat
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from elastic.trips import checkpointer
from layouts import mesh_of, whole

SOON_S = 600


class Adapted(nn.Module):
    """Frozen bfloat16 layers, each with a trained adapter of rank 2.

    Args:
        num_layers: layers of width * width frozen weights.
        width: of every layer.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width, bias=False).bfloat16() for _ in range(num_layers))
        self.base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, width) -> the same."""
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x.bfloat16()).float() + up(down(x)))
        return x


class Tuning:
    """An adapted model, its optimizer, and a step of training."""

    def __init__(self, num_layers: int = 2, width: int = 1536, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model: Any = Adapted(num_layers, width)
        if dist.is_initialized():
            mesh = mesh_of(dist.get_world_size())
            for base in self.model.base:
                fully_shard(base, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        """One step."""
        self.model(torch.linspace(-1, 1, self.width)[None, :]).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of all parameters. Collective."""
        text = hashlib.sha256()
        self.model.state_dict()  # lets FSDP put its shards back
        for name, parameter in self.model.named_parameters():
            text.update(name.encode())
            text.update(whole(parameter).view(-1).view(torch.uint8).numpy().tobytes())
        return text.hexdigest()


def written_bytes(home: Path, known: set[int]) -> int:
    """Bytes on disk of the inodes under `home` that are not in `known`, which gets them."""
    num_bytes = 0
    for path in home.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # deleted by retention meanwhile
            facts = path.stat()
            if stat.S_ISREG(facts.st_mode) and facts.st_ino not in known:
                known.add(facts.st_ino)
                num_bytes += max(facts.st_size, facts.st_blocks * 512)
    return num_bytes


def save_three(rank: int, home: Path, sizes: tuple[int, int]) -> dict[str, Any]:
    """Two saves, then one of an attempt that has resumed; what each has written, and the last digests."""
    tuning = Tuning(*sizes)
    written: list[int] = []
    known: set[int] = set()

    def save(ckpt: holdfast.Checkpointer, step: int) -> None:
        tuning.train()
        ckpt.save(step).wait_durable(SOON_S)
        barrier()
        written.append(written_bytes(home, known))
        barrier()

    with checkpointer(home, tuning.state) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2)
    digests = [tuning.digest()]
    tuning = Tuning(*sizes, seed=1)
    with checkpointer(home, tuning.state) as ckpt:
        assert ckpt.restore() == 2
        digests.append(tuning.digest())
        save(ckpt, 3)
    digests.append(tuning.digest())
    tuning = Tuning(*sizes, seed=2)
    with checkpointer(home, tuning.state, keep=1) as ckpt:
        assert ckpt.restore() == 3
        assert tuning.digest() == digests[-1]
        save(ckpt, 4)
    return {"written": written, "digests": digests, "last": tuning.digest()}


def barrier() -> None:
    """Let every rank come to this place."""
    if dist.is_initialized():
        dist.barrier()


def restore_tuning(rank: int, home: Path, sizes: tuple[int, int]) -> tuple[int | None, str]:
    """Restore the newest checkpoint; its step and its digest."""
    tuning = Tuning(*sizes, seed=3)
    with checkpointer(home, tuning.state) as ckpt:
        step = ckpt.restore()
    return step, tuning.digest()


def change_frozen(rank: int, home: Path) -> dict[str, Any]:
    """Change one frozen weight in the open, then one through .data; what became of the saves."""
    tuning = Tuning()
    digests = {}
    with checkpointer(home, tuning.state) as ckpt, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ckpt.save(1).wait_durable(SOON_S)
        with torch.no_grad():
            tuning.model.base[1].weight[3, 4] = 7.0
        digests[2] = tuning.digest()
        ckpt.save(2).wait_durable(SOON_S)
        tuning.model.base[0].weight.data[5, 6] = 9.0
        digests[4] = tuning.digest()
        told = None
        try:
            ckpt.save(3).wait_durable(SOON_S)
        except holdfast.InvalidInput as dropped:
            told = str(dropped)
        ckpt.save(4).wait_durable(SOON_S)
    return {
        "digests": digests,
        "told": told,
        "warned": [str(one.message) for one in warned if issubclass(one.category, holdfast.SaveWarning)],
    }


def average(rank: int, home: Path, num_steps: int) -> int:
    """Keep an average beside the training, changed at odd steps, and after each third save."""
    tuning = Tuning(1, 64)
    copy = nn.ModuleList(nn.Linear(512, 512) for _ in range(16)).requires_grad_(False)
    tuning.state["average"] = copy
    with checkpointer(home, tuning.state, limits=holdfast.Limits(patience=None)) as ckpt:
        for step in range(1, num_steps + 1):
            tuning.train()
            if step % 2:
                fill(copy, step)
            ckpt.save(step)
            if step % 3 == 0:
                fill(copy, step + 0.5)
        fill(copy, num_steps + 1)
        ckpt.save(num_steps + 1).wait_durable(SOON_S)
    return len(list(home.glob("step-*/manifest-*.json")))


def fill(module: nn.Module, value: float) -> None:
    """Give all weights one value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
