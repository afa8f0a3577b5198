"""Code of a rank in the tests of reading: save a large state, restore it, and count the bytes it reads."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from elastic.trips import checkpointer
from holdfast.checkpoint.store.local import LocalStore
from layouts import mesh_of, whole

WIDTH = 1024
_read: dict[str, int] = {"data": 0, "other": 0, "kill_at": 0}


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH - 24))


def state_in(layout: str) -> dict[str, Any]:
    """A model with its optimizer, 50 MB, or 25 MB in three tensors cut by rows or by columns."""
    torch.manual_seed(5)
    if layout in ("rows", "columns"):
        mesh, cut = mesh_of(dist.get_world_size()), [Shard(("rows", "columns").index(layout))]
        sizes = (2048, 2040, 2056)
        return {f"t{n}": distribute_tensor(torch.randn(n, WIDTH), mesh, cut) for n in sizes}
    model: Any = _layers()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp":
        mesh = mesh_of(dist.get_world_size())
        model = fully_shard(model, mesh=mesh)
    elif layout == "hsdp":
        model = fully_shard(model, mesh=mesh_of(2, dist.get_world_size() // 2, names=("replicate", "shard")))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=False)}


def train(state: dict[str, Any]) -> None:
    """One step, so that there are moments."""
    if "model" in state:
        x = torch.linspace(-1, 1, 2 * WIDTH)[None, :]
        state["model"](x).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state that are large, by name."""
    if "model" not in state:
        return {name: tensor for name, tensor in state.items() if name.startswith("t")}
    named = {}
    for name, parameter in state["model"].named_parameters():
        name = name.removeprefix("module.")
        named[name] = parameter
        for key, value in state["optimizer"].state.get(parameter, {}).items():
            named[f"{name}.{key}"] = value
    return named


def digest(state: dict[str, Any]) -> str:
    """Of all tensors, whole. Collective."""
    text = hashlib.sha256()
    for name, tensor in sorted(tensors_of(state).items()):
        text.update(name.encode())
        text.update(whole(tensor).contiguous().numpy().tobytes())
    return text.hexdigest()


def needed_bytes(state: dict[str, Any]) -> int:
    """Bytes of this rank's part of the large tensors."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors_of(state).values()]
    return sum(tensor.nbytes for tensor in local)


@functools.cache
def count_reads() -> None:
    """From now on, count what this process reads from stores; `kill_at` bytes of data end it."""
    read_into, get = LocalStore.read_into, LocalStore.get

    def counted_read(self: LocalStore, name: str, offset: int, buffer: memoryview) -> None:
        _read["data"] += len(buffer)
        if _read["kill_at"] and _read["data"] >= _read["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        read_into(self, name, offset, buffer)

    def counted_get(self: LocalStore, name: str) -> bytes:
        data = get(self, name)
        _read["other"] += len(data)
        return data

    LocalStore.read_into, LocalStore.get = counted_read, counted_get  # type: ignore[method-assign]


def save_large(rank: int, home: Path, layout: str, num_saves: int = 1) -> str:
    """Save a state; the digest of the last one."""
    state = state_in(layout)
    with checkpointer(home, state) as ckpt:
        for step in range(1, num_saves + 1):
            train(state)
            ckpt.save(step)
        ckpt.wait()
        return digest(state)


def restore_large(
    rank: int, home: Path, layout: str, *, share: bool = False, kill: int | None = None
) -> dict[str, Any]:
    """Restore into other numbers; what was read for it. With `kill`, that rank ends in the midst of it."""
    count_reads()
    state = state_in(layout)
    with torch.no_grad():
        for tensor in tensors_of(state).values():
            tensor.zero_()
    limits = holdfast.Limits() if kill is None else holdfast.Limits(rank_timeout=5)
    with checkpointer(home, state, reads=holdfast.Reads(shared=share), limits=limits) as ckpt:
        _read.update(data=0, other=0, kill_at=4 << 20 if rank == kill else 0)
        step = ckpt.restore()
        read = dict(_read)
    return {"step": step, "read": read["data"], "needed": needed_bytes(state), "digest": digest(state)}


def restore_beside_a_death(rank: int, home: Path, layout: str, victim: int) -> str:
    """Restore with shared reads while one rank dies; the error that the others get."""
    try:
        restore_large(rank, home, layout, share=True, kill=victim)
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "restored"
