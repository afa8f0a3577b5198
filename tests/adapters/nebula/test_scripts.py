"""Scripts written for Nebula run unchanged except for the import: alone, as several ranks, with DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from adapters.nebula.running import run, run_ranks

WHERE = "NEBULA_PERSISTENT_STORAGE_PATH"
INTERVAL = "NEBULA_PERSISTENT_TIME_INTERVAL"


def test_the_samples_of_the_documentation_run(home: str) -> None:
    assert run("seed", home).split() == ["done"]
    assert holdfast.open(home).verify().is_good


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_last_save_bit_for_bit(home: str) -> None:
    """The run is killed right after save() returns; the keeper completes the checkpoint."""
    whole = run("train", 6, 0, env={WHERE: home + "-whole"}).split()
    run("train", 6, 3, status=-signal.SIGKILL, env={WHERE: home})
    resumed = run("train", 6, 0, env={WHERE: home}).split()
    assert resumed[:2] == ["start", "3"]
    assert resumed[2:] == whole[2:]
    assert holdfast.open(home).step == 6


@pytest.mark.slow
def test_a_run_killed_after_its_last_save_trains_no_further_step(home: str) -> None:
    whole = run("train", 3, 0, env={WHERE: home + "-whole"}).split()
    run("train", 3, 3, status=-signal.SIGKILL, env={WHERE: home})
    assert run("train", 3, 0, env={WHERE: home}).split() == ["start", "3", *whole[2:]]


@pytest.mark.slow
def test_a_checkpoint_only_in_near_tiers_is_found_after_a_kill(home: str) -> None:
    """With an interval of an hour, home is still empty."""
    run("train", 4, 2, status=-signal.SIGKILL, env={WHERE: home, INTERVAL: "3600"})
    resumed = run("train", 4, 0, env={WHERE: home, INTERVAL: "3600"}).split()
    assert resumed[:2] == ["start", "2"]
    assert holdfast.open(home).step == 4, "at the end everything is in home"


@pytest.mark.slow
def test_a_script_that_searches_all_tiers_itself_finds_the_newest(home: str) -> None:
    assert run("mainz", home, "global_step7").split() == ["none"]
    import holdfast.adapters.nebula as nm
    from holdfast.adapters.nebula import interface

    nm.init(home, 3600)
    for step in (7, 8):
        nm.Checkpoint(f"global_step{step}").save("model", {"step": step})
        if step == 7:
            nm.flush_persistence()
    assert nm.list_checkpoints()["global_step8"]["tiers"] == ["local"]
    assert run("mainz", home, "global_step8").split() == ["global_step8"], (
        "the tag that is noted, though near"
    )
    assert run("mainz", home, "global_step9").split() == ["global_step7"], "else what is persisted"
    interface.end()
    assert run("mainz", home, "global_step9").split() == ["global_step8"]


def results(count: int, *args: object, dies: bool = False) -> list[list[dict[str, Any]]]:
    """Run ranks, and return the JSON that each has printed."""
    return [[json.loads(line) for line in lines] for lines in run_ranks(count, *args, dies=dies)]


@pytest.mark.ranks
def test_one_rank_saves_without_waiting_for_the_others(home: str) -> None:
    results(2, home, "only_first", 3, 3, "raw", dies=True)
    found = results(2, home, "only_first", 4, 0, "raw")
    assert found == [[{"tag": "global_step3", "rank": 0}]] * 2
    checkpoint = holdfast.open(home)
    assert (checkpoint.step, checkpoint.world_size) == (4, 1)
    assert checkpoint.verify().is_good


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["all_commit", "counted"])
def test_ranks_save_their_parts_into_one_checkpoint_and_load_their_own(home: str, mode: str) -> None:
    results(2, home, mode, 3, 2, "settled", dies=True)
    found = results(2, home, mode, 4, 0, "raw")
    assert found == [[{"tag": "global_step2", "rank": rank}] for rank in range(2)]
    checkpoint = holdfast.open(home)
    assert (checkpoint.step, checkpoint.world_size) == (4, 2)
    assert checkpoint.verify().is_good


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all_commit", "counted"])
def test_ranks_killed_during_a_save_find_a_complete_checkpoint(home: str, mode: str) -> None:
    """The next start waits half a minute for a keeper whose checkpoint cannot be completed."""
    results(2, home, mode, 3, 2, "raw", dies=True)
    found = results(2, home, mode, 4, 0, "raw")
    tags = {one["tag"] for (one,) in found}
    assert len(tags) == 1
    assert tags <= {"global_step1", "global_step2"}
    assert [one["rank"] for (one,) in found] == [0, 1]


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_with_files_are_the_ranks_of_the_checkpoint(home: str) -> None:
    results(3, home, "some", 2, 0, "raw")
    assert holdfast.open(home).world_size == 2
    found = results(3, home, "some", 2, 0, "raw")
    assert [one["rank"] for (one,) in found] == [0, 0, 2], "a rank that has none takes the lowest's"


@pytest.mark.ranks
def test_an_uncounted_save_on_a_second_rank_raises(home: str) -> None:
    message = [line for lines in results(2, home, "careless", 1, 0, "raw") for line in lines]
    assert len(message) == 1
    assert "num_of_files was not given" in message[0]["refused"]
    assert holdfast.open(home).world_size == 1


def lines_of(ranks: list[list[str]], word: str) -> list[str]:
    """Return the line of each rank that begins with a word, without DeepSpeed's own lines."""
    return [next(line for line in lines if line.startswith(word)) for lines in ranks]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_killed_run_of_deepspeed_resumes_bit_for_bit(
    home: str, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_STAGE", stage)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    whole = run_ranks(2, home + "-whole", tmp_path / "whole", 4, 0, script="zero")
    run_ranks(2, home, tmp_path / "ds", 4, 2, script="zero", dies=True)
    resumed = run_ranks(2, home, tmp_path / "ds", 4, 0, script="zero")
    assert lines_of(resumed, "start") == ["start 2"] * 2
    assert lines_of(resumed, "weights") == lines_of(whole, "weights")
    checkpoint = holdfast.open(home)
    assert checkpoint.world_size == 2
    assert checkpoint.verify().is_good
    assert torch.load(tmp_path / "ds" / "pytorch_model.bin", weights_only=True)
