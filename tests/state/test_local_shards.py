"""Plain tensors with the shard attributes of torch 2.14, saved and restored by real ranks."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter
from holdfast.checkpoint.format.layout import Region
from stage.ranks import run_ranks
from stage.training import make_checkpointer

pytestmark = pytest.mark.ranks
WHOLE = torch.arange(24.0).reshape(6, 4)
PADDING = -1.0


def shard(whole: torch.Tensor) -> Any:
    """This rank's rows of a tensor, between two padded rows; perhaps none."""
    size = -(-len(whole) // dist.get_world_size())
    start = size * dist.get_rank()
    inner = whole[start : start + size]
    tensor: Any = torch.full((len(inner) + 2, *whole.shape[1:]), PADDING)
    tensor[1:-1] = inner
    tensor.global_shape, tensor.global_offsets = tuple(whole.shape), ((start, 0),) if len(inner) else ()
    tensor.local_offsets = ((1, 0),) if len(inner) else ()
    tensor.local_sizes = (tuple(inner.shape),) if len(inner) else ()
    return tensor


def with_attributes_of(tensor: Any, other: Any) -> Any:
    vars(tensor).update({name: value for name, value in vars(other).items() if "al_" in name})
    return tensor


class Net(nn.Module):
    """A parameter that is a shard, and one that is whole on every rank."""

    def __init__(self, local: torch.Tensor, bias: float) -> None:
        super().__init__()
        self.weight = with_attributes_of(nn.Parameter(local.detach().clone()), local)
        self.bias = nn.Parameter(torch.full((3,), bias))


def try_to_save(rank: int, home: Path, *, case: str) -> str:
    """The error of a save in which the ranks' shards do not fit together."""
    tensor = shard(WHOLE)
    state: dict[str, Any] = {"w": tensor}
    if case == "overlap" and rank == 1:
        tensor.global_offsets = ((2, 0),)
    if case == "gap" and rank == 1:
        tensor.local_sizes = ((2, 4),)
    if case == "mixed" and rank == 1:
        state["w"] = WHOLE.clone()
    if case == "optimizer":
        state["net"] = Net(tensor, 0.0)
        state["opt"] = torch.optim.SGD(state["net"].parameters(), lr=0.0, momentum=0.9)
        state["net"].weight.grad = torch.ones_like(state["net"].weight)
        state["opt"].step()
    try:
        with make_checkpointer(home, state) as ckpt:
            ckpt.save(1).wait_durable()
            if case == "moved" and rank == 1:
                tensor.global_offsets = ((0, 0),)
            if case == "exchanged":
                tensor.global_offsets = ((3 - 3 * rank, 0),)
            ckpt.save(2).wait_durable()
    except holdfast.HoldfastError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("overlap", r"Ranks 0 and 1 both hold the region \[2:3, 0:4\] of w\. Nothing was saved"),
        ("gap", r"No rank holds the region \[5:6, 0:4\] of w"),
        ("mixed", r"No rank holds the region \[3:6, 0:4\] of w"),
        ("optimizer", "net.weight.momentum_buffer cannot be saved: its parameter holds a shard of a global"),
        ("moved", "of w on rank 1: one lists .3:6, 0:4., another .0:3, 0:4."),
    ],
)
def test_shards_that_do_not_fit_together_are_refused(tmp_path: Path, case: str, expected: str) -> None:
    said = run_ranks(2, functools.partial(try_to_save, case=case), tmp_path / "home")
    assert all(re.search(expected, one) for one in said), said


def test_shards_may_change_places_between_two_saves(tmp_path: Path) -> None:
    assert run_ranks(2, functools.partial(try_to_save, case="exchanged"), tmp_path / "home") == ["saved"] * 2
    assert torch.equal(holdfast.open(tmp_path / "home")["w"], torch.cat([WHOLE[3:], WHOLE[:3]]))


def cut(region: Region, rng: random.Random, num_cuts: int) -> list[Region]:
    """Cut a region into smaller ones, each time across the longest side."""
    found = [region]
    for _ in range(num_cuts):
        one = max(found, key=lambda each: max(each.sizes))
        if max(one.sizes) < 2:
            break
        dim, (at, sizes) = one.sizes.index(max(one.sizes)), one
        first = rng.randrange(1, sizes[dim])
        found.remove(one)
        found.append(Region(at, (*sizes[:dim], first, *sizes[dim + 1 :])))
        at = (*at[:dim], at[dim] + first, *at[dim + 1 :])
        found.append(Region(at, (*sizes[:dim], sizes[dim] - first, *sizes[dim + 1 :])))
    return found


def hold(whole: torch.Tensor, regions: list[Region], rng: random.Random) -> Any:
    """A tensor with some regions of a whole one, one below the other, with padding around them."""
    gaps = [rng.randrange(3) for _ in range(len(regions) + 1)]
    inner = [max((region.sizes[dim] for region in regions), default=0) + 1 for dim in range(1, whole.ndim)]
    places, row = [], gaps[0]
    for region, gap in zip(regions, gaps[1:], strict=True):
        spare = [rng.randrange(a - b + 1) for a, b in zip(inner, region.sizes[1:], strict=True)]
        places.append(Region((row, *spare), region.sizes))
        row += region.sizes[0] + gap
    tensor: Any = torch.full((row, *inner), PADDING).to(whole.dtype)
    for region, place in zip(regions, places, strict=True):
        tensor[place.slices] = whole[region.slices]
    tensor.global_shape, tensor.local_sizes = tuple(whole.shape), tuple(one.sizes for one in regions)
    tensor.global_offsets = tuple(one.offsets for one in regions)
    tensor.local_offsets = tuple(one.offsets for one in places)
    return tensor


def wholes() -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of several shapes and dtypes, with a different number in each place."""
    for number, shape in enumerate([(7,), (6, 4), (3, 5, 4), (1, 9), (11, 2), (2, 2, 2, 3)]):
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            count = torch.Size(shape).numel()
            yield f"t{number}{dtype}", (torch.arange(count) + number).reshape(shape).to(dtype)


def divided(seed: int, rank: int, world_size: int, *, blank: bool) -> dict[str, Any]:
    """This rank's shards of all of `wholes`, by chance: none or several, some of them held by two ranks."""
    state: dict[str, Any] = {}
    for name, whole in wholes():
        rng = random.Random(f"{seed} {name}")
        owners = [
            (region, {rng.randrange(world_size), rng.randrange(world_size)})
            for region in cut(Region.whole(tuple(whole.shape)), rng, rng.randrange(9))
        ]
        mine = [region for region, ranks in owners if rank in ranks]
        rng.shuffle(mine)
        state[name] = hold(torch.zeros_like(whole) if blank else whole, mine, rng)
    return state


def wrong(seed: int, rank: int, world_size: int, state: dict[str, Any]) -> list[str]:
    """Names whose shards or padding differ from those of the whole tensors."""
    expected = divided(seed, rank, world_size, blank=False)
    return [name for name, tensor in expected.items() if not torch.equal(state[name].detach(), tensor)]


def trained(seed: int, *, blank: bool, device: str = "cpu") -> tuple[Net, torch.optim.Optimizer]:
    """A module whose parameter is several shards, and its optimizer, with a step unless it is on meta."""
    local = divided(seed, dist.get_rank(), dist.get_world_size(), blank=blank)["t1torch.float32"]
    with torch.device(device):
        net = Net(with_attributes_of(local.to(device), local), 1.0 if blank else 5.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    if device != "meta":
        for parameter in net.parameters():
            parameter.grad = parameter.detach() * 2
        optimizer.step()
        state = optimizer.state[net.weight]
        state["momentum_buffer"] = with_attributes_of(state["momentum_buffer"], net.weight)
    return net, optimizer


def save_divided(rank: int, home: Path, seed: int) -> None:
    """Save twice; the second save has other bytes."""
    state: dict[str, Any] = divided(seed, rank, dist.get_world_size(), blank=False)
    boxed = shard(WHOLE)
    net, optimizer = trained(seed, blank=False)
    with make_checkpointer(home, {**state, "box": {"x": [boxed]}, "net": net, "opt": optimizer}) as ckpt:
        for tensor in (*state.values(), boxed):
            tensor.neg_()
        ckpt.save(1)
        for tensor in (*state.values(), boxed):
            tensor.neg_()
        ckpt.save(2)


def restore_divided(rank: int, home: Path, seed: int) -> list[str]:
    """Restore into another division. On even ranks the module is on meta, and the optimizer has no state."""
    state = divided(seed, rank, dist.get_world_size(), blank=True)
    boxed, is_meta = shard(torch.zeros(6, 4)), rank % 2 == 0
    net, optimizer = trained(seed, blank=True, device="meta" if is_meta else "cpu")
    with make_checkpointer(home, {**state, "box": {"x": [boxed]}, "net": net, "opt": optimizer}) as ckpt:
        assert ckpt.restore() == 2
    found = wrong(seed, rank, dist.get_world_size(), state)
    expected, has_bytes = state["t1torch.float32"], state["t1torch.float32"] != PADDING
    momentum = optimizer.state[net.weight]["momentum_buffer"]
    for name, tensor, factor in (("weight", net.weight, 1), ("momentum", momentum, 2)):
        if not torch.equal(tensor.detach()[has_bytes], expected[has_bytes] * factor):
            found.append(name)
        if is_meta and tensor.detach()[~has_bytes].any():
            found.append(f"padding of {name}")
    if not torch.equal(boxed, shard(WHOLE)) or net.bias.tolist() != [5.0] * 3:
        found.append("box or bias")
    return found


@pytest.mark.parametrize(
    ("saving", "restoring", "seed"),
    [
        (2, 2, 1),
        *(pytest.param(*n, marks=pytest.mark.slow) for n in ((4, 1, 2), (1, 4, 3), (4, 2, 4), (2, 4, 5))),
    ],
)
def test_several_shards_of_a_tensor_on_a_rank_are_restored_in_any_other_division(
    tmp_path: Path, saving: int, restoring: int, seed: int
) -> None:
    home = tmp_path / "home"
    assert run_ranks(saving, save_divided, home, seed) == [None] * saving
    assert wrong_in(home) == []
    assert holdfast.open(home)["net.bias"].tolist() == [5.0] * 3
    name, expected = next(wholes())
    state: dict[str, Any] = {name: torch.zeros_like(expected)}
    dcp.load(state, storage_reader=HoldfastReader(home))  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(state[name], expected)
    assert run_ranks(restoring, restore_divided, home, seed + 100) == [[]] * restoring


def wrong_in(home: Path) -> list[str]:
    """Names whose tensor in a checkpoint differs from the whole one."""
    found = holdfast.open(home)
    assert found.verify().is_good
    return [name for name, whole in wholes() if not torch.equal(found[name], whole)]


def through_dcp(rank: int, home: Path, saves: bool) -> list[str]:
    """Save shards with DCP, or take a home of the Checkpointer; load others with DCP."""
    size = dist.get_world_size()
    if saves:
        dcp.save(divided(1, rank, size, blank=False), storage_writer=HoldfastWriter(home))  # pyright: ignore[reportPrivateImportUsage]
    else:
        save_divided(rank, home, 1)
    state = divided(2, rank, size, blank=True)
    dcp.load(state, storage_reader=HoldfastReader(home))  # pyright: ignore[reportPrivateImportUsage]
    return wrong(2, rank, size, state)


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="DCP of torch 2.14 was the first")
@pytest.mark.parametrize("saves", [True, False])
def test_dcp_saves_and_loads_several_shards_of_a_tensor_on_a_rank(tmp_path: Path, saves: bool) -> None:
    home = tmp_path / "home"
    assert run_ranks(2, through_dcp, home, saves) == [[], []]
    assert wrong_in(home) == []
    assert run_ranks(1, restore_divided if not saves else load_all, home, 3) == [[]]


def load_all(rank: int, home: Path, seed: int) -> list[str]:
    state: dict[str, Any] = divided(seed, rank, dist.get_world_size(), blank=True)
    with make_checkpointer(home, state) as ckpt:
        ckpt.restore(strict=False)
    return wrong(seed, rank, dist.get_world_size(), state)
