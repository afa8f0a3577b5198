"""Several ranks: one saves, all commit, each saves some files, kills, mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

import holdfast
from adapters.nebula import running

pytestmark = pytest.mark.ranks


def run_ranks(count: int, *args: object, dies: bool = False) -> list[list[dict[str, Any]]]:
    """Run ranks and return the lines of each."""
    return [[json.loads(line) for line in lines] for lines in running.run_ranks(count, *args, dies=dies)]


def test_one_rank_saves_without_waiting_for_the_others(home: str) -> None:
    run_ranks(2, home, "only_first", 3, 3, "raw", dies=True)
    found = run_ranks(2, home, "only_first", 4, 0, "raw")
    assert found == [[{"tag": "global_step3", "rank": 0}]] * 2
    checkpoint = holdfast.open(home)
    assert (checkpoint.step, checkpoint.world_size) == (4, 1)
    assert checkpoint.verify().is_good


@pytest.mark.parametrize("mode", ["all_commit", "counted"])
def test_ranks_save_their_parts_into_one_checkpoint_and_load_their_own(home: str, mode: str) -> None:
    run_ranks(2, home, mode, 3, 2, "settled", dies=True)
    found = run_ranks(2, home, mode, 4, 0, "raw")
    assert found == [[{"tag": "global_step2", "rank": rank}] for rank in range(2)]
    checkpoint = holdfast.open(home)
    assert (checkpoint.step, checkpoint.world_size) == (4, 2)
    assert checkpoint.verify().is_good


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all_commit", "counted"])
def test_ranks_killed_during_a_save_find_a_complete_checkpoint(home: str, mode: str) -> None:
    """The next start waits half a minute for a keeper whose checkpoint cannot be completed."""
    run_ranks(2, home, mode, 3, 2, "raw", dies=True)
    found = run_ranks(2, home, mode, 4, 0, "raw")
    tags = {one["tag"] for (one,) in found}
    assert len(tags) == 1
    assert tags <= {"global_step1", "global_step2"}
    assert [one["rank"] for (one,) in found] == [0, 1]


@pytest.mark.slow
def test_ranks_with_files_are_the_ranks_of_the_checkpoint(home: str) -> None:
    run_ranks(3, home, "some", 2, 0, "raw")
    assert holdfast.open(home).world_size == 2
    found = run_ranks(3, home, "some", 2, 0, "raw")
    assert [one["rank"] for (one,) in found] == [0, 0, 2], "a rank that has none takes the lowest's"


def test_an_uncounted_save_on_a_second_rank_raises(home: str) -> None:
    message = [line for lines in run_ranks(2, home, "careless", 1, 0, "raw") for line in lines]
    assert len(message) == 1
    assert "num_of_files was not given" in message[0]["refused"]
    assert holdfast.open(home).world_size == 1
