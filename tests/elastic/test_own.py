"""Tensors that differ on every rank, restored on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic.conftest import Worlds
from elastic.trips import checkpointer


class Stage(nn.Module):
    """A layer and a buffer that only this stage has."""

    def __init__(self, *stages: int) -> None:
        super().__init__()
        for stage in stages:
            self.register_parameter(f"weight{stage}", nn.Parameter(torch.zeros(3)))
            self.register_buffer(f"mean{stage}", torch.zeros(2))


def save_stages(rank: int, home: Path) -> None:
    stage = Stage(rank)
    stage.get_buffer(f"mean{rank}").fill_(5.0 + rank)
    with checkpointer(home, {"model": stage}) as ckpt:
        ckpt.save(1)


def restore_whole(rank: int, home: Path) -> list[list[float]]:
    model = Stage(0, 1)
    with checkpointer(home, {"model": model}) as ckpt:
        assert ckpt.restore() == 1
    return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.ranks
def test_a_buffer_of_one_pipeline_stage_reaches_ranks_that_were_in_another(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds(2).run(save_stages, tmp_path / "home")
    assert worlds(1).run(restore_whole, tmp_path / "home") == [[[5.0] * 2, [6.0] * 2]]
    assert worlds(3).run(restore_whole, tmp_path / "home") == [[[5.0] * 2, [6.0] * 2]] * 3


def save_seeded(rank: int, home: Path) -> list[float]:
    torch.manual_seed(10 + rank)
    with checkpointer(home, {"epoch": 1}) as ckpt:
        ckpt.save(1)
    return torch.rand(2).tolist()


def restore_seeded(rank: int, home: Path) -> list[float]:
    torch.manual_seed(0)
    with checkpointer(home, {"epoch": 0}) as ckpt:
        assert ckpt.restore() == 1
    return torch.rand(2).tolist()


@pytest.mark.ranks
def test_generators_continue_on_the_same_number_of_ranks_and_differ_on_another(
    worlds: Worlds, tmp_path: Path
) -> None:
    saved = worlds(2).run(save_seeded, tmp_path / "home")
    assert worlds(2).run(restore_seeded, tmp_path / "home") == saved
    more = worlds(3).run(restore_seeded, tmp_path / "home")
    assert len(set(map(tuple, more))) == 3
    assert more == worlds(3).run(restore_seeded, tmp_path / "home")


class Cursor:
    """The place of a data loader: each rank has its own."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def save_cursor(rank: int, home: Path) -> None:
    with checkpointer(home, {"data": Cursor(10 * rank)}) as ckpt:
        ckpt.save(1)


def restore_cursor(rank: int, home: Path) -> int:
    cursor = Cursor(-1)
    with checkpointer(home, {"data": cursor}) as ckpt:
        ckpt.restore()
    assert dist.get_world_size() == 3
    return cursor.place


@pytest.mark.ranks
def test_a_rank_takes_the_data_position_of_its_number_modulo_the_saved_ranks(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds(2).run(save_cursor, tmp_path / "home")
    assert worlds(3).run(restore_cursor, tmp_path / "home") == [0, 10, 0]
