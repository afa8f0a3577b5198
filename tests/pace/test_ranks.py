"""Slow ranks of real trainings on gloo ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nursery
from holdfast.watch.pace.sampler import Activity
from holdfast.watch.pace.windows import CAUSES, QUEUE_CAUSE, decode_windows
from pace.trials import PaceTrial

ALWAYS = 600.0


def trial(folder: Path, *, world_size: int = 3, kind: str = "ddp") -> PaceTrial:
    return PaceTrial(folder, nursery.shared(), world_size=world_size, kind=kind)


@pytest.mark.essential
def test_a_rank_with_a_slow_data_loader_is_named_once_with_its_cause_and_cost(tmp_path: Path) -> None:
    with trial(tmp_path) as training:
        training.begin("loader", odd=1, seconds=ALWAYS, window="0.4s")
        training.wait_until(lambda: bool(training.slow()))
        training.wait_until(lambda: len(training.lines("pace")) >= 3)
        training.end()
        ((attempt, found),) = training.slow()
        assert (attempt, found.rank) == (1, 1)
        assert found.host == os.uname().nodename
        assert found.cause == CAUSES[Activity.LOADS]
        assert found.factor > 1.3
        assert 0.1 < found.cost_share < 1
        assert training.printed().count("SLOW RANK") == 1
        assert all(decode_windows(line) is not None for line in training.lines("pace"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("way", ["loader", "disk"])
def test_a_slow_rank_is_named(tmp_path: Path, way: str, kind: str) -> None:
    with trial(tmp_path, kind=kind) as training:
        training.begin(way, odd=2, seconds=ALWAYS, window="1s")
        training.wait_until(lambda: bool(training.accused()))
        training.end()
        assert training.accused() == {2}
        cause = CAUSES[Activity.LOADS if way == "loader" else Activity.SLEEPS]
        assert {one.cause for _, one in training.slow() if one.rank == 2} == {cause}


@pytest.mark.alone  # any other program on a processor makes its rank slow too
def test_a_rank_whose_processor_is_used_by_another_program_is_named(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    with trial(tmp_path, world_size=2) as training:
        training.begin("none", odd=0, seconds=ALWAYS, window="1s")
        training.wait_until(lambda: bool(training.lines("pace")))
        training.hog(1, 120.0)
        training.wait_until(lambda: any(one.rank == 1 for _, one in training.slow()))
        assert {one.cause for _, one in training.slow() if one.rank == 1} == {QUEUE_CAUSE}
        training.end()


@pytest.mark.slow
def test_ranks_of_several_hosts_are_compared_through_the_history(tmp_path: Path) -> None:
    with trial(tmp_path, world_size=4) as training:
        training.begin("loader", odd=3, seconds=ALWAYS, num_hosts=2, window="1s")
        training.wait_until(lambda: bool(training.accused()))
        training.end()
        assert training.accused() == {3}
        assert {line["rank"] for line in training.lines("pace")} == {0, 2}, "the lowest rank of each host"
        assert training.printed().count("SLOW RANK") == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["none", "sequences", "evaluation", "phase", "compile", "saves", "half"])
def test_healthy_ranks_are_not_accused(tmp_path: Path, way: str) -> None:
    """Half of the ranks have more work in the last case."""
    kind, world_size = "fsdp" if way == "compile" else "ddp", 4 if way == "half" else 3
    with trial(tmp_path, kind=kind, world_size=world_size) as training:
        training.begin(way, odd=1, seconds=25.0, window="1s")
        training.finish()
        assert training.accused() == set()
        assert len(training.lines("pace")) >= 3


@pytest.mark.slow
def test_turned_off_no_rank_is_compared(tmp_path: Path) -> None:
    with trial(tmp_path, world_size=2) as training:
        training.begin("loader", odd=1, seconds=8.0, action="off", window="0.4s")
        training.finish()
        assert not training.lines("pace", "slow-rank")
