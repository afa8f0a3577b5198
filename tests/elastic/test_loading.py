"""A reader on other ranks than those that saved: each loads its own parts of a sharded module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from elastic.conftest import Worlds
from elastic.trips import checkpointer


def make_sharded(world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model


def save_sharded(rank: int, home: Path) -> None:
    with checkpointer(home, {"model": make_sharded(2)}) as ckpt:
        ckpt.save(1)


def load_sharded(rank: int, home: Path) -> list[float]:
    model = make_sharded(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    holdfast.open(home).load_into(model)
    weights = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    by_name = {n: t for n, t in model.state_dict().items() if isinstance(t, DTensor)}
    with torch.no_grad():
        for tensor in by_name.values():
            tensor.to_local().zero_()
    holdfast.open(home).load_into(by_name, "model")
    assert all(torch.equal(t.full_tensor(), w) for t, w in zip(by_name.values(), weights, strict=True))
    return [weight.double().sum().item() for weight in weights]


@pytest.mark.ranks
def test_three_ranks_load_what_two_have_saved(worlds: Worlds, tmp_path: Path) -> None:
    home = tmp_path / "home"
    worlds(2).run(save_sharded, home)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    expected = [parameter.double().sum().item() for parameter in model.parameters()]
    assert worlds(3).run(load_sharded, home) == [expected] * 3
    found = holdfast.open(home).state_dict("model")
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
