"""Bytes: a rank reads what it needs and little more; ranks that share their reads read each byte once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.conftest import Worlds
from elastic.reads import restore_beside_a_death, restore_large, save_large
from elastic.world import RankDied, World

pytestmark = pytest.mark.ranks
on_cpu = pytest.mark.fsdp2_on_cpu

MOST = 1.05


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        pytest.param((2, "fsdp"), (1, "alone"), marks=[pytest.mark.slow, on_cpu]),
        pytest.param((2, "fsdp"), (3, "fsdp"), marks=[pytest.mark.slow, on_cpu]),
        pytest.param((2, "fsdp"), (4, "fsdp"), marks=on_cpu),
        pytest.param((4, "fsdp"), (2, "fsdp"), marks=[pytest.mark.slow, on_cpu]),
        pytest.param((4, "hsdp"), (3, "fsdp"), marks=[pytest.mark.slow, on_cpu]),
        pytest.param((4, "fsdp"), (4, "hsdp"), marks=[pytest.mark.slow, on_cpu]),
        pytest.param((2, "ddp"), (4, "fsdp"), marks=pytest.mark.slow),
    ],
)
def test_a_rank_reads_what_it_needs(
    worlds: Worlds, tmp_path: Path, saved: tuple[int, str], wanted: tuple[int, str]
) -> None:
    (expected, *_) = worlds(saved[0]).run(save_large, tmp_path / "home", saved[1])
    for told in worlds(wanted[0]).run(restore_large, tmp_path / "home", wanted[1]):
        assert told["digest"] == expected
        assert 1 << 20 < told["needed"] <= told["read"] <= MOST * told["needed"], told


def restore_shared(world: World, home: Path, layout: str) -> list[dict[str, Any]]:
    return world.run(_restore_shared, home, layout)


def _restore_shared(rank: int, home: Path, layout: str) -> dict[str, Any]:
    return restore_large(rank, home, layout, share=True)


@pytest.mark.parametrize(
    ("saved", "wanted", "num_copies"),
    [
        ((2, "rows"), (4, "columns"), 1),
        pytest.param((1, "alone"), (3, "ddp"), 3, marks=pytest.mark.slow),
        pytest.param((2, "rows"), (3, "columns"), 1, marks=pytest.mark.slow),
        pytest.param((4, "fsdp"), (4, "hsdp"), 2, marks=[pytest.mark.slow, on_cpu]),
    ],
)
def test_ranks_that_share_their_reads_read_each_byte_once(
    worlds: Worlds, tmp_path: Path, saved: tuple[int, str], wanted: tuple[int, str], num_copies: int
) -> None:
    (expected, *_) = worlds(saved[0]).run(save_large, tmp_path / "home", saved[1])
    told = restore_shared(worlds(wanted[0]), tmp_path / "home", wanted[1])
    assert [one["digest"] for one in told] == [expected] * wanted[0]
    distinct = sum(one["needed"] for one in told) / num_copies
    assert 1 << 24 < distinct <= sum(one["read"] for one in told) <= MOST * distinct
    assert max(one["read"] for one in told) <= 1.5 * distinct / wanted[0]


def test_damage_found_by_one_rank_makes_all_ranks_that_share_reads_fall_back(
    worlds: Worlds, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    worlds(2).run(save_large, home, "rows", 1)
    expected = worlds(2).run(save_again, home)
    (file,) = (home / "step-00000002").glob("rank-00001-*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    told = restore_shared(worlds(4), home, "columns")
    assert [one["step"] for one in told] == [1] * 4
    assert [one["digest"] for one in told] == [expected[0]] * 4


def save_again(rank: int, home: Path) -> str:
    """Restore step 1, take its digest, change everything, and save step 2."""
    import torch

    from elastic.reads import digest, state_in, tensors_of
    from elastic.trips import checkpointer

    state = state_in("rows")
    with checkpointer(home, state) as ckpt:
        assert ckpt.restore() == 1
        before = digest(state)
        with torch.no_grad():
            for tensor in tensors_of(state).values():
                tensor.add_(1)
        ckpt.save(2)
    return before


@pytest.mark.slow
def test_a_rank_that_dies_in_a_shared_read_leaves_an_error_and_no_hang(
    worlds: Worlds, broken_world: Worlds, tmp_path: Path
) -> None:
    worlds(2).run(save_large, tmp_path / "home", "rows")
    world = broken_world(3)
    world.start(restore_beside_a_death, tmp_path / "home", "columns", 1)
    with pytest.raises(RankDied, match="ended with -9"):
        world.finish(ranks=[1])
    told = world.finish(ranks=[0, 2])
    assert all(text.startswith("RetryLater: ") for text in told), told
    assert all("has died, hangs" in text or "was lost" in text for text in told), told
