"""One small model in every layout on 1 to 4 ranks, with its optimizer and what else a state holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

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
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.register_buffer("count", torch.tensor(3))

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
        if stage == 0:
            self.register_buffer("scale", whole.get_buffer("scale"))
        else:
            self.register_buffer("count", whole.get_buffer("count"))

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


def _ddp() -> Any:
    return DistributedDataParallel(Net())


def _fsdp(**options: Any) -> Any:
    model: Any = Net()
    fully_shard(model.up, mesh=_all(), **options)
    return fully_shard(model, mesh=_all(), **options)


def _unresharded() -> Any:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return _fsdp(reshard_after_forward=False, mp_policy=half)


def _offload() -> Any:
    return _fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False))


def _meta() -> Any:
    with torch.device("meta"):
        model = _fsdp()
    return model.to_empty(device="cpu")


def _hsdp() -> Any:
    return fully_shard(Net(), mesh=mesh_of(2, dist.get_world_size() // 2, names=("replicate", "shard")))


def _partly() -> Any:
    """FSDP on one layer; the others are plain tensors, alike on all ranks."""
    model: Any = Net()
    fully_shard(model.up, mesh=_all())
    return model


def _parallel(model: Any, mesh: DeviceMesh) -> Any:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp() -> Any:
    return _parallel(Net(), _all())


def _pairs() -> DeviceMesh:
    return mesh_of(dist.get_world_size() // 2, 2, names=("data", "tensor"))


def _tp_pairs() -> Any:
    """Tensor parallel in pairs: each pair has a mesh of its own."""
    return _parallel(Net(), _pairs()["tensor"])


def _fsdp_tp() -> Any:
    """Strided shards: cut by columns within pairs, then by rows across them."""
    mesh = _pairs()
    model: Any = _parallel(Net(), mesh["tensor"])
    fully_shard(model.up, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def _pipeline() -> Any:
    return Half(dist.get_rank() // (dist.get_world_size() // 2))


def _pipeline_fsdp() -> Any:
    mesh = mesh_of(2, dist.get_world_size() // 2, names=("stage", "shard"))
    return fully_shard(Half(mesh.get_local_rank("stage")), mesh=mesh["shard"])


LAYOUTS: dict[str, Callable[[], Any]] = {
    "alone": Net,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "unresharded": _unresharded,
    "offload": _offload,
    "meta": _meta,
    "hsdp": _hsdp,
    "partly": _partly,
    "tp": _tp,
    "tp-pairs": _tp_pairs,
    "fsdp-tp": _fsdp_tp,
    "pipeline": _pipeline,
    "pipeline-fsdp": _pipeline_fsdp,
}
BY_SIZE: dict[int, tuple[str, ...]] = {
    1: ("alone",),
    2: ("ddp", "fsdp", "offload", "meta", "partly", "tp", "pipeline"),
    3: ("ddp", "fsdp", "unresharded", "partly"),
    4: tuple(name for name in LAYOUTS if name != "alone"),
}
"""The layouts of each number of ranks."""


class Run:
    """A training run in a layout: its objects, and how to train them."""

    def __init__(self, layout: str, *, seed: int, is_reversed: bool = False) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed)
        self.model: Any = LAYOUTS[layout]()
        bare: Any = self.model.module if layout == "ddp" else self.model
        weights = [p for p in bare.parameters() if p.dim() > 1]
        others = [p for p in bare.parameters() if p.dim() <= 1]
        groups: list[Any] = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]
        # Not foreach: it does not take plain tensors and DTensors, or DTensors of several meshes, together.
        self.optimizer = torch.optim.AdamW(groups[::-1] if is_reversed else groups, lr=0.01, foreach=False)
        self.table = torch.randn(5, 3).bfloat16()
        self.own = torch.randn(2) + rank
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "table": holdfast.replicated(self.table),
            "own": holdfast.per_rank(self.own),
            "epoch": seed,
        }

    def train(self) -> None:
        """Two steps with the same input everywhere."""
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randint(0, WORDS, (5,), generator=generator)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def full(self) -> dict[str, Any]:
        """Every tensor whole, gathered by DTensor's own collectives and from all ranks, by its own name.

        Ranks: collective; all ranks get the same.
        """
        here: dict[str, torch.Tensor] = {"table": self.table.clone()}
        self.model.state_dict()  # lets FSDP put its shards back
        for name, parameter in self.model.named_parameters():
            name = name.removeprefix("module.")
            here[name] = whole(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                here[f"{name}.{key}"] = whole(value)
        here |= {name.removeprefix("module."): one.clone() for name, one in self.model.named_buffers()}
        every: dict[str, torch.Tensor] = {}
        for tensors in gather(here):
            for name, tensor in tensors.items():
                assert same(every.setdefault(name, tensor), tensor), f"the ranks differ in {name}"
        facts = {"epoch": self.state["epoch"], "own": gather(self.own.clone())}
        return {"tensors": every, **facts}


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
