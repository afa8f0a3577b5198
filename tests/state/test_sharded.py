"""Sharded states on real ranks: all ranks together write the whole state, and it loads into any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from holdfast.checkpoint.state import State
from layouts import gather, mesh_of, whole
from stage.ranks import run_ranks
from state.worlds import FOUR, TWO, Checkpoint, load_all, save_all, told, trip


@pytest.mark.slow
@pytest.mark.ranks
def test_every_layout_loads_into_every_layout_on_4_2_and_1_ranks(tmp_path: Path) -> None:
    """Parameters, moments and counters, bit for bit, whether or not the optimizer has stepped.

    On the way, what the ranks write of each layout is put together and compared with what DTensor gathers.
    """
    (tmp_path / "1").mkdir()
    save_all(0, tmp_path / "1", ("alone",))
    assert run_ranks(4, trip, tmp_path, FOUR, ("on-meta",)) == [None] * 4
    assert run_ranks(2, trip, tmp_path, TWO) == [None] * 2
    assert len(list(tmp_path.rglob("*.pt"))) == 1 + len(FOUR) + len(TWO)
    load_all(0, tmp_path, ("alone",))


@pytest.mark.ranks
def test_a_module_whose_hooks_split_and_merge_a_sharded_weight_loads_on_2_and_1_ranks(tmp_path: Path) -> None:
    """Torchtitan's fused projection does that: its load hook takes DTensors and no plain tensors."""
    assert run_ranks(2, _save_and_load_split, tmp_path) == [None] * 2
    assert run_ranks(1, _load_split, tmp_path) == [None]


class _Fused(nn.Linear):
    """Linear layer that is saved as two halves, like torchtitan's `FusedQKVLinear`."""

    def __init__(self) -> None:
        super().__init__(3, 6, bias=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        tensor = state.pop(f"{prefix}weight")
        if isinstance(tensor, DTensor):
            tensor = tensor.redistribute(tensor.device_mesh, [Replicate()])
        state[f"{prefix}upper"], state[f"{prefix}lower"] = tensor[:3].contiguous(), tensor[3:].contiguous()

    @staticmethod
    def _merge(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}upper" in state:
            state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}upper"), state.pop(f"{prefix}lower")])


def _fused() -> nn.Module:
    model = nn.Sequential(_Fused(), nn.Linear(6, 2))
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    return model


def _save_and_load_split(rank: int, folder: Path) -> None:
    model = _fused()
    captured = State({"model": model}).capture()
    checkpoint = Checkpoint(gather(told(captured, rank)))
    assert checkpoint.tensors.keys() == {f"model.{n}" for n in ("0.upper", "0.lower", "1.weight", "1.bias")}
    full = {name: whole(parameter) for name, parameter in model.named_parameters()}
    if rank == 0:
        torch.save((vars(checkpoint), full), folder / "split.pt")
    gather(None)  # rank 0 has written
    _load_split(rank, folder)


def _load_split(rank: int, folder: Path) -> None:
    members, full = torch.load(folder / "split.pt", weights_only=False)
    checkpoint = Checkpoint([])
    vars(checkpoint).update(members)
    model = _fused()
    checkpoint.load(State({"model": model}), rank)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), full[name]), name
