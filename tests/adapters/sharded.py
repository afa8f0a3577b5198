"""Code of the ranks in the DCP tests: make a sharded model and optimizer, save and load them with DCP."""

# torch documents dcp.save and dcp.load, but does not list them as exported.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast import Checkpointer
from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter
from holdfast.system import failpoint

NUMBERS = {"lr": 0.5, "betas": (0.9, 0.95), "name": "run", "blob": b"\x00\xff", "nothing": None}


def make_model() -> nn.Module:
    """Model whose rows do not divide evenly by any number of ranks above one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(11, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def shard(model: nn.Module, layout: str) -> nn.Module:
    """Shard the model over all ranks: "fsdp", "hsdp" (groups of 2), "ddp", "tp" or "tp+fsdp" (strided)."""
    world = dist.get_world_size()
    if layout == "ddp":
        return replicate(model)
    if layout.startswith("tp"):
        return shard_over_tensors(model, with_fsdp=layout == "tp+fsdp")
    shape, dims = ((world // 2, 2), ("replicate", "shard")) if layout == "hsdp" else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_over_tensors(model: nn.Module, *, with_fsdp: bool) -> nn.Module:
    """Split the first layer by rows and the last by columns, and optionally apply FSDP over groups of 2."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2) if with_fsdp else (1, world), mesh_dim_names=("dp", "tp"))
    layers = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    model = parallelize_module(model, mesh["tp"], layers)
    if with_fsdp:
        fully_shard(model, mesh=mesh["dp"])
    return model


def make_state(*, layout: str, trained: bool) -> dict[str, Any]:
    """Return a nested state like torchtitan's. An untrained one has different numbers everywhere."""
    model = make_model()
    if not trained:
        for parameter in model.parameters():
            nn.init.constant_(parameter, -1.0)
    model = shard(model, layout) if layout else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 11)).square().mean().backward()
        if not trained:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "table": torch.arange(12.0).reshape(3, 4) * (1 if trained else 0),
        "extra": dict(NUMBERS) if trained else dict.fromkeys(NUMBERS),
    }


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Return every leaf of nested dicts and lists, with whole tensors as lists of numbers."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path}.{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from flat(value, f"{path}[{index}]")
    elif isinstance(tree, torch.Tensor):
        whole = tree.full_tensor() if isinstance(tree, DTensor) else tree
        yield path, (str(whole.dtype), whole.detach().tolist())
    else:
        yield path, tree


def save(rank: int, home: Path, layout: str, step: int = 5) -> dict[str, Any]:
    """Save a trained state; return its values, gathered without the checkpoint."""
    state = make_state(layout=layout, trained=True)
    kept = dict(flat(state))
    dcp.save(state, storage_writer=HoldfastWriter(home, step=step))
    return kept


def load(rank: int, home: Path, layout: str) -> dict[str, Any]:
    """Load the newest checkpoint into an untrained state; return the values of the state."""
    state = make_state(layout=layout, trained=False)
    dcp.load(state, storage_reader=HoldfastReader(home))
    return dict(flat(state))


def save_by_checkpointer(rank: int, home: Path) -> dict[str, Any]:
    """Save a sharded model with a Checkpointer; return its values."""
    model = shard(make_model(), "fsdp")
    with Checkpointer(
        home, {"model": model}, quiet=True, watches=[holdfast.Preemption(signals=False)]
    ) as ckpt:
        ckpt.save(1)
    return dict(flat({"model": get_model_state_dict(model)}))


def load_model(rank: int, home: Path, layout: str) -> dict[str, Any]:
    """Load only the model of the newest checkpoint; return its values."""
    state = {"model": make_state(layout=layout, trained=False)["model"]}
    dcp.load(state, storage_reader=HoldfastReader(home))
    return dict(flat(state))


def save_async(rank: int, home: Path, kind: str) -> dict[str, Any]:
    """Start an async save, change the state after staging, then save again."""
    state = make_state(layout="fsdp", trained=True)
    kept = dict(flat(state))
    kinds = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)  # torch 2.6 has threads only
    options = {"async_checkpointer_type": kinds[kind]} if kinds else {}
    saved = dcp.async_save(state, storage_writer=HoldfastWriter(home, step=6), **options)
    assert isinstance(saved, Future)
    with torch.no_grad():
        for tensor in state["model"].values():
            tensor.zero_()
    saved.result(timeout=600)
    dcp.save({"later": torch.ones(2)}, storage_writer=HoldfastWriter(home, step=7))
    return kept


def save_what_cannot_be_saved(rank: int, home: Path) -> str:
    """Save with a value on one rank that cannot be saved; return DCP's error."""
    state = {"table": torch.ones(3), "odd": {"thing": object()}}
    try:
        dcp.save(state, storage_writer=HoldfastWriter(home, step=5))
    except CheckpointException as error:
        return str(error)
    return "saved"


def arm(point: str) -> None:
    """Let this process kill itself at failpoint "NAME:N", after the environment has been read."""
    failpoint._name, _, count = point.partition(":")
    failpoint._left = int(count or 1)


def fall_while_saving(rank: int, folder: str, home: Path) -> None:
    """Save step 9 on two ranks; kill rank 1 when its data file is durable, but its part is not."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    state = make_state(layout="fsdp", trained=True)
    if rank == 1:
        arm("store.linked:1")
    try:
        dcp.save(state, storage_writer=HoldfastWriter(home, step=9))
    finally:
        os._exit(3)  # the peer is gone: nothing more can be said


def save_in_one_process(home: Path, step: int, kill_at: str) -> None:
    """Save the step as a value; the process is killed at a failpoint, if given."""
    arm(kill_at)
    dcp.save({"x": torch.full((2,), float(step))}, storage_writer=HoldfastWriter(home, step=step))


def choose_apart(rank: int, home: Path) -> str:
    """Load while the ranks find different newest checkpoints; return DCP's error."""
    target = {"table": torch.zeros(3, 4)}
    try:
        dcp.load(target, storage_reader=HoldfastReader(home, step=1 + rank))
    except CheckpointException as error:
        return str(error)
    return "loaded"


def save_stages(rank: int, home: Path) -> dict[str, Any]:
    """Save one stage of a pipeline per rank with a Checkpointer; return its parameters and options."""
    names = {0: "0", 1: "2"}
    stage = nn.ModuleDict({names[rank]: nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1 + rank)
    torch.stack([one.square().sum() for one in stage.parameters()]).sum().backward()
    optimizer.step()
    state = {"model": stage, "optimizer": optimizer}
    options = holdfast.Preemption(signals=False)
    with Checkpointer(home, state, quiet=True, watches=[options]) as ckpt:
        ckpt.save(1)
    found = get_optimizer_state_dict(stage, optimizer)
    return dict(flat({"model": stage.state_dict(), "state": found["state"]}))
