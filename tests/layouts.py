"""One small model in every layout on 1 to 4 ranks, and how to see all of a tensor there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WORDS = 7


class Net(nn.Module):
    """Layers that few numbers of ranks divide evenly; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.tail = nn.Linear(6, 3)  # fewer rows than ranks
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n,) int64 -> a loss."""
        hidden = self.norm(self.down(torch.relu(self.up(self.embed(x)))))
        return self.head(hidden).sum() + self.tail(hidden).square().sum()


class Half(nn.Module):
    """The layers of one of two pipeline stages, under the names that they have in the whole."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        whole = Net()
        self.stage = stage
        for name in (("embed", "up", "head"), ("down", "norm", "tail"))[stage]:
            setattr(self, name, getattr(whole, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n,) int64 -> a loss of this stage alone."""
        own: Any = self
        if self.stage == 0:
            return own.up(own.embed(x)).square().sum() + own.head(own.embed(x)).sum()
        return own.tail(own.norm(own.down(torch.ones(5, 8)))).square().sum()


@functools.cache  # each mesh makes process groups, which takes long
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh over all ranks."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _all() -> DeviceMesh:
    return mesh_of(dist.get_world_size())


def _fsdp(**options: Any) -> Any:
    model: Any = Net()
    fully_shard(model.up, mesh=_all(), **options)
    return fully_shard(model, mesh=_all(), **options)


def _on_meta() -> Any:
    """There to be loaded into."""
    with torch.device("meta"):
        return _fsdp()


def _partly() -> Any:
    """FSDP on one layer; the others are plain tensors, alike on all ranks."""
    model: Any = Net()
    fully_shard(model.up, mesh=_all())
    return model


def tensor_parallel(model: Any, mesh: DeviceMesh) -> Any:
    """Columns of one layer and rows of the next."""
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _pairs() -> DeviceMesh:
    return mesh_of(dist.get_world_size() // 2, 2, names=("data", "tensor"))


def _fsdp_tp() -> Any:
    """Strided shards: cut by columns within pairs, then by rows across them."""
    mesh = _pairs()
    model: Any = tensor_parallel(Net(), mesh["tensor"])
    fully_shard(model.up, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def _halves(first: str) -> DeviceMesh:
    """Half of the ranks by the other half: two copies or stages, each in shards."""
    return mesh_of(2, dist.get_world_size() // 2, names=(first, "shard"))


def _fsdp1(**options: Any) -> Any:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(Net(), use_orig_params=True, device_id=cpu, **options)


def _fsdp1_hybrid(*, by_groups: bool) -> Any:
    """Sharded in pairs, alike in both; by process groups, FSDP1 gives ShardedTensors of a pair."""
    mesh, strategy = _halves("replicate"), ShardingStrategy.HYBRID_SHARD
    if not by_groups:
        return _fsdp1(device_mesh=mesh, sharding_strategy=strategy)
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    return _fsdp1(process_group=groups, sharding_strategy=strategy)


def _pipeline_fsdp() -> Any:
    mesh = _halves("stage")
    return fully_shard(Half(mesh.get_local_rank("stage")), mesh=mesh["shard"])


_HALF_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
LAYOUTS: dict[str, Callable[[], Any]] = {
    "alone": Net,
    "ddp": lambda: DistributedDataParallel(Net()),
    "fsdp": _fsdp,
    "unresharded": lambda: _fsdp(reshard_after_forward=False, mp_policy=_HALF_PRECISION),
    "offload": lambda: _fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "meta": lambda: _on_meta().to_empty(device="cpu"),
    "on-meta": _on_meta,
    "hsdp": lambda: fully_shard(Net(), mesh=_halves("replicate")),
    "partly": _partly,
    "tp": lambda: tensor_parallel(Net(), _all()),
    "tp-pairs": lambda: tensor_parallel(Net(), _pairs()["tensor"]),  # each pair has a mesh of its own
    "fsdp-tp": _fsdp_tp,
    "fsdp1": _fsdp1,
    "fsdp1-mesh": lambda: _fsdp1(device_mesh=_all()),  # gives DTensors instead of ShardedTensors
    "fsdp1-hybrid": lambda: _fsdp1_hybrid(by_groups=False),
    "fsdp1-hybrid-groups": lambda: _fsdp1_hybrid(by_groups=True),
    "pipeline": lambda: Half(dist.get_rank() // (dist.get_world_size() // 2)),
    "pipeline-fsdp": _pipeline_fsdp,
}


class Trained:
    """A model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    def train(self) -> None:
        """Make two steps with the same input everywhere."""
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randint(0, WORDS, (5,), generator=generator)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of all of a tensor. Collective over its mesh."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors are of one shape and dtype and alike bit for bit."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
