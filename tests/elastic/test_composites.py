"""Composite tensors on several ranks: sharded, copied, and under DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from elastic.conftest import Worlds
from elastic.trips import checkpointer
from holdfast.errors import HoldfastError, InvalidInput, NotFound
from wrapped import Coded, Momentum, coded, same_coded

pytestmark = pytest.mark.ranks

ROWS = 7  # not a multiple of the ranks


def whole_complex(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))


def sharded_complex(seed: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(whole_complex(seed), mesh, [Shard(0)])


def save_complex(rank: int, home: Path) -> None:
    with checkpointer(home, {"w": sharded_complex(1), "in": [sharded_complex(2)]}) as ckpt:
        ckpt.save(1)


def restore_complex(rank: int, home: Path) -> bool:
    state: dict[str, Any] = {"w": sharded_complex(3), "in": [sharded_complex(4)]}
    with checkpointer(home, state) as ckpt:
        assert ckpt.restore() == 1
    found = state["w"].full_tensor(), state["in"][0].full_tensor()
    return all(torch.equal(one, whole_complex(seed)) for one, seed in zip(found, (1, 2), strict=True))


def test_a_sharded_complex_tensor_is_restored_on_any_number_of_ranks(worlds: Worlds, tmp_path: Path) -> None:
    worlds(2).run(save_complex, tmp_path / "home")
    for size in (2, 3, 4):
        assert worlds(size).run(restore_complex, tmp_path / "home") == [True] * size


def over_local(rank: int, seed: int, *, is_sharded: bool = True) -> Any:
    """A DTensor whose local tensor is a subclass, with rows of unequal number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes = [len(part) for part in torch.arange(ROWS).chunk(dist.get_world_size())]
    local = coded(rows=sizes[rank], seed=seed + rank) if is_sharded else coded(rows=ROWS, seed=seed)
    placement = Shard(0) if is_sharded else Replicate()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size((ROWS, 3)), stride=(3, 1)
    )


def save_over_local(rank: int, home: Path, is_sharded: bool) -> None:
    held = over_local(rank, 10, is_sharded=is_sharded)
    with checkpointer(home, {"w": held, "in": [held]}) as ckpt:
        ckpt.save(1)
        ckpt.save(2)


def restore_over_local(rank: int, home: Path, is_sharded: bool) -> str:
    held = over_local(rank, 50, is_sharded=is_sharded)
    state: dict[str, Any] = {"w": held, "in": [over_local(rank, 60, is_sharded=is_sharded)]}
    with checkpointer(home, state) as ckpt:
        try:
            assert ckpt.restore() == 2
        except InvalidInput as error:
            assert same_coded(held.to_local(), over_local(rank, 50).to_local())
            return str(error)
    assert state["w"] is held
    expected = over_local(rank, 10, is_sharded=is_sharded).to_local()
    return str([same_coded(one.to_local(), expected) for one in (held, state["in"][0])])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_dtensor_over_a_subclass_needs_the_same_ranks_only_if_it_is_sharded(
    worlds: Worlds, tmp_path: Path, is_sharded: bool
) -> None:
    worlds(2).run(save_over_local, tmp_path / "home", is_sharded)
    for size in (2, 3, 4):
        for message in worlds(size).run(restore_over_local, tmp_path / "home", is_sharded):
            if is_sharded and size != 2:
                assert "w cannot be restored" in message or "in.0" in message
            else:
                assert message == "[True, True]"


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    layer = nn.Linear(3, 4, bias=False)
    return {"model": layer, "optimizer": Momentum(layer.parameters()), "base": coded(seed=seed)}


def save_training(rank: int, home: Path) -> None:
    state = training(1)
    with checkpointer(home, state) as ckpt:
        for step in (1, 2):
            state["model"].weight.grad = torch.full((4, 3), float(step))
            state["optimizer"].step()
            ckpt.save(step)


def restore_training(rank: int, home: Path) -> tuple[list[int], list[float], bool]:
    state = training(2)
    with checkpointer(home, state) as ckpt:
        assert ckpt.restore() == 2
    momentum: Coded = state["optimizer"].state[state["model"].weight]["momentum"]
    own = same_coded(state["base"], coded(seed=1))
    return momentum.codes.flatten().tolist(), momentum.scale.tolist(), own


def test_state_of_subclasses_that_all_ranks_have_is_written_once(worlds: Worlds, tmp_path: Path) -> None:
    """And restored on any number of ranks, before the optimizer has made its state."""
    home = tmp_path / "home"
    worlds(2).run(save_training, home)
    info = holdfast.open(home).info("optimizer.state.model.weight.momentum.codes")
    assert info.owner in (0, 1)
    found = [one for size in (1, 2, 3) for one in worlds(size).run(restore_training, home)]
    assert found == [found[0]] * 6
    assert found[0][2]
    assert any(found[0][0])


def save_mixed(rank: int, home: Path) -> str:
    """Only rank 0's part is of a subclass, as if it were large enough to be quantized."""
    mesh = init_device_mesh("cpu", (2,))
    local = coded(rows=4) if rank == 0 else torch.zeros(3, 3)
    held = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((ROWS, 3)), stride=(3, 1)
    )
    try:
        with checkpointer(home, {"w": held}) as ckpt:
            ckpt.save(1)
            ckpt.wait()
    except HoldfastError as error:
        return str(error)
    return "saved"


def test_a_dtensor_over_a_subclass_on_some_ranks_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    messages = worlds(2).run(save_mixed, tmp_path / "home")
    assert all("w" in message and message != "saved" for message in messages), messages
    with pytest.raises(NotFound):
        holdfast.open(tmp_path / "home")


def low_bit(seed: int, kind: str) -> dict[str, Any]:
    import torchao.optim  # pyright: ignore[reportMissingImports]

    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return {"model": model, "optimizer": getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)}


def train_low_bit(rank: int, home: Path, kind: str, num_restarts: int, steps: int) -> list[float] | str:
    """Train, restoring first; every step is saved. The result is this rank's part of the weights."""
    state = low_bit(1 + num_restarts, kind)
    as_it_is = mock.patch.object(torch, "compile", lambda function, **_: function)
    try:
        with as_it_is, checkpointer(home, state) as ckpt:
            first = ckpt.restore() or 0
            for step in range(first, steps):
                state["model"](torch.full((4, 64), 0.1 * step + rank)).square().mean().backward()
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                ckpt.save(step + 1)
            ckpt.wait()
    except InvalidInput as error:
        return str(error)
    return torch.cat([p.to_local().flatten() for p in state["model"].parameters()]).tolist()


@pytest.mark.slow
@pytest.mark.fsdp2_on_cpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_fsdp2_with_a_low_bit_optimizer_resumes_bit_for_bit(
    worlds: Worlds, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("torchao.optim")
    whole = worlds(2).run(train_low_bit, tmp_path / "whole", kind, 0, 4)
    worlds(2).run(train_low_bit, tmp_path / "parts", kind, 0, 2)
    assert worlds(2).run(train_low_bit, tmp_path / "parts", kind, 1, 4) == whole
    for message in worlds(3).run(train_low_bit, tmp_path / "parts", kind, 2, 5):
        assert "cannot be restored" in message
