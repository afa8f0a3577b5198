"""Scripts written for Nebula run unchanged except for the import."""

from __future__ import annotations

import signal

import pytest

import holdfast
from adapters.nebula.running import run

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
