"""Holders of tensors on ranks with different states; one process takes the place of all ranks in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from holdfast.checkpoint.state import State, per_rank, replicated
from holdfast.checkpoint.state.holders import HolderAgreement, agree, inventory
from holdfast.checkpoint.state.sharding import ShardLayout, held_by
from holdfast.errors import InvalidInput
from state.trip import fake_ranks, kept, step_once


def _inventory(
    *names: str, layout: ShardLayout | None = None, shape: tuple[int, ...] = (4,)
) -> dict[str, Any]:
    return inventory({"model"}, dict.fromkeys(names, ("torch.float32", shape, layout)), ())


def _agreed(inventories: list[dict[str, Any]]) -> list[HolderAgreement]:
    """What each rank comes to; each is a thread."""
    world_size = len(inventories)
    told: list[Any] = [None] * world_size
    meet = threading.Barrier(world_size, timeout=600)

    def rank_of(rank: int) -> HolderAgreement:
        def gather(value: Any) -> list[Any]:
            told[rank] = value
            meet.wait()
            heard = list(told)
            meet.wait()
            return heard

        return agree(inventories[rank], rank, world_size, gather)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(rank_of, range(world_size)))


def test_equal_ranks_exchange_one_digest() -> None:
    """And then every plain tensor is held by all."""
    asked = []

    def gather(value: Any) -> list[Any]:
        asked.append(value)
        return [value] * 3

    agreement = agree(_inventory("model.a"), 1, 3, gather)
    assert len(asked) == 1
    assert agreement.is_alike
    layout = agreement.layout("model.new", None, is_lowest=False, in_module=True)
    assert layout.copies == ((0,), (1,), (2,))


def test_a_single_rank_does_not_communicate() -> None:
    """There may be no process group at all."""
    state = State({"model": torch.nn.Linear(1, 1)}, world=(0, 1))
    state.agree(lambda value: pytest.fail("asked"))
    assert state.capture().structure.shardings["model.weight"].layout.copies == ((0,),)


def test_each_pipeline_stage_holds_its_own_layers() -> None:
    """What both have is held by both; a layer that is new on one rank is that rank's."""
    first, second = _inventory("model.a", "model.both"), _inventory("model.b", "model.both")
    agreements = _agreed([first, first, second, second])
    for rank, agreement in enumerate(agreements):

        def holders(name: str, agreement: HolderAgreement = agreement, **options: Any) -> frozenset[int]:
            flags = {"is_lowest": False, "in_module": True, **options}
            return agreement.layout(name, None, **flags).holders

        assert not agreement.is_alike
        assert holders("model.a") == {0, 1}
        assert holders("model.b") == {2, 3}
        assert holders("model.both") == {0, 1, 2, 3}
        assert holders("model.b", is_lowest=True) == {2}
        assert holders("model.new") == {rank}
        assert holders("model.lr", in_module=False) == {0, 1, 2, 3}
        assert agreement.names == {"model.a", "model.b", "model.both"}


def test_tensor_parallel_pairs_are_copies_of_each_other() -> None:
    """Each pair sees a mesh of its own; together they are two copies, for optimizer state too."""
    pairs = [ShardLayout(((0, 2),), ((0, 1),)), ShardLayout(((0, 2),), ((2, 3),))]
    ranks = [_inventory("model.w", layout=pairs[rank // 2]) for rank in range(4)]
    for rank, agreement in enumerate(_agreed(ranks)):
        raw = pairs[rank // 2]
        layout = agreement.layout("model.w", raw, is_lowest=False, in_module=True)
        assert layout.splits == ((0, 2),)
        assert layout.copies == ((0, 1), (2, 3))
        assert agreement.follow(raw, layout, raw) is layout
        assert agreement.follow(None, layout, raw).copies == ((0,), (1,), (2,), (3,))
        assert agreement.is_alike


@pytest.mark.parametrize(
    "other",
    [_inventory("model.w", shape=(5,)), _inventory("model.w", layout=ShardLayout(((0, 2),), ((0, 1),)))],
)
def test_the_error_names_different_tensors_of_one_name(other: dict[str, Any]) -> None:
    """With both ranks and what each has."""
    match = r"model.w is torch.float32\[4\], whole on rank 0 but .* on rank 1"
    with pytest.raises(InvalidInput, match=match):
        _agreed([_inventory("model.w"), other])


def test_annotations_of_the_user_take_precedence() -> None:
    """Ranks that replicated() names hold the tensor."""
    agreement = replace(HolderAgreement(0, 4), marked={"table": (1, 3)})
    assert agreement.layout("table.x", None, is_lowest=False, in_module=False) is held_by((1, 3))
    assert agreement.layout("tables", None, is_lowest=False, in_module=False) is held_by((0, 1, 2, 3))


@pytest.fixture
def _second_of_four() -> Iterator[None]:
    with fake_ranks(2, 4):
        yield


class _Stage(nn.Module):
    """A stage with layers of its own."""

    first: nn.Linear
    second: nn.Linear

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))


def _train(model: nn.Module) -> torch.optim.Optimizer:
    return step_once(torch.optim.AdamW(model.parameters()))


def _other_stage(value: Any) -> list[Any]:
    """Ranks 0 and 1 have the layer `first`, ranks 2 and 3 `second`, as this one."""
    if isinstance(value, str):
        return ["other", "other", value, value]
    table = {**value, "tensors": {n.replace("second", "first"): t for n, t in value["tensors"].items()}}
    return [table, None, value, None]


@pytest.mark.usefixtures("_second_of_four")
def test_optimizer_state_has_the_holders_of_its_parameter() -> None:
    """Also if it appears only after the ranks have agreed."""
    model = _Stage("second")
    optimizer = torch.optim.AdamW(model.parameters())
    table = replicated({"x": torch.zeros(2)}, ranks=[3, 2])
    state = State({"model": model, "optimizer": optimizer, "own": per_rank(nn.Linear(1, 1)), "table": table})
    before = state.capture().structure
    state.agree(_other_stage)
    step_once(optimizer)
    captured = state.capture()
    assert captured.structure is not before
    state_of = "optimizer.state.model.second.weight"
    for name in ("model.second.weight", f"{state_of}.exp_avg", f"{state_of}.step", "table.x"):
        assert captured.structure.shardings[name].layout.copies == ((2,), (3,)), name
    assert captured.structure.per_rank == {"own.weight", "own.bias", "rng.torch"}
    assert captured.structure.shardings.keys() == captured.tensors.keys() - captured.structure.per_rank
    assert state.capture().structure is captured.structure


@pytest.mark.usefixtures("_second_of_four")
def test_a_pipeline_stage_loads_its_part_of_a_whole_checkpoint() -> None:
    """Strictly; what no rank has is still refused."""
    whole = _Stage("first", "second")
    saved = kept({"model": whole, "optimizer": _train(whole)})
    model = _Stage("second")
    state = State({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    with pytest.raises(InvalidInput, match=r"model\.first\.weight"):
        saved.plan(state)
    state.agree(_other_stage)
    load = saved.restore(state)
    assert not load.unexpected
    assert torch.equal(model.second.weight, whole.second.weight)
    extra = _Stage("first", "second", "third")
    with pytest.raises(InvalidInput, match=r"model\.third\.bias") as caught:
        kept({"model": extra, "optimizer": _train(extra)}).plan(state)
    assert "first" not in str(caught.value)


def test_a_whole_model_loads_a_checkpoint_of_pipeline_stages() -> None:
    """Groups and state of parameters that the chosen part lacks come from the others."""
    stages = {name: _Stage(name) for name in ("first", "second")}
    parts = {name: kept({"model": m, "optimizer": _train(m)}) for name, m in stages.items()}
    parts["second"].values["optimizer"]["param_groups"][0]["lr"] = 0.25
    whole = _Stage("second", "first")
    layers = (whole.first, whole.second)
    optimizer = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in layers])
    first, second = parts["first"], parts["second"]
    first.tensors.update(second.tensors)
    first.specs.update(second.specs)
    load = first.restore(State({"model": whole, "optimizer": optimizer}), others=[second.values])
    assert not load.missing
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.25]
    for name, stage in stages.items():
        assert torch.equal(*(m.get_parameter(f"{name}.weight") for m in (whole, stage)))
    assert len(optimizer.state) == 4


def test_parameters_without_an_optimizer_are_frozen() -> None:
    """A base model under an adapter; buffers and loose tensors are not meant."""
    base, adapter = nn.BatchNorm1d(2), nn.Linear(2, 2)
    objects = {"base": base, "adapter": adapter, "loose": nn.Parameter(torch.ones(1))}
    assert State(objects).capture().structure.frozen == frozenset()
    trained = {**objects, "optimizer": torch.optim.SGD(adapter.parameters())}
    state = State(trained)
    captured = state.capture()
    assert captured.structure.frozen == {"base.weight", "base.bias"}
    trained["optimizer"].add_param_group({"params": [base.bias]})
    assert state.capture().structure.frozen == {"base.weight"}
    assert state.capture().structure is not captured.structure


@pytest.mark.usefixtures("_second_of_four")
def test_per_rank_parameters_are_never_frozen() -> None:
    """Every rank writes its own of these."""
    base, adapter = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(adapter.parameters())
    captured = State({"base": per_rank(base), "adapter": adapter, "optimizer": optimizer}).capture()
    assert captured.structure.frozen == frozenset()
