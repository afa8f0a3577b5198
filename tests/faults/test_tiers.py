"""Runs with a local tier: what dies, is lost or fails on the way, and the nearest good copy that is found."""

from __future__ import annotations

import random
import re
import shutil
import signal

import pytest

from faults.playground import ENDLESS, TOTAL, Playground, end, flip_bit, kill_host_at_random

HOLD = ("--hold", "10m")


@pytest.fixture
def local(playground: Playground) -> tuple[str, str]:
    """The options of a run with a local tier."""
    return "--local", str(playground.local)


def kill_after(playground: Playground, num_steps: int, *options: str) -> None:
    """SIGKILL a trainer when it has made that many steps."""
    child = playground.start("--step-s", "0.01", *ENDLESS, *options)
    playground.wait_for_steps(num_steps, child)
    child.kill()
    assert child.wait() == -signal.SIGKILL, child.said()


def test_a_killed_trainer_resumes_from_its_keepers_memory(
    playground: Playground, uninterrupted: str, local: tuple[str, str]
):
    """Nothing is read from a disk but small documents, and the keeper then ends at once."""
    kill_after(playground, 7, *local, *HOLD)
    playground.wait_for(lambda: playground.complete(playground.local), "a save")
    playground.check_finishes_like(uninterrupted, *local, said="from memory (")


def test_memory_is_offered_without_a_local_tier_too(playground: Playground, uninterrupted: str):
    """A plain home profits as well: its keeper still has the last save mapped."""
    kill_after(playground, 7, *HOLD)
    playground.check_finishes_like(uninterrupted, said="from memory (")


def test_memory_that_the_next_save_has_overwritten_is_read_from_disk(
    playground: Playground, uninterrupted: str, local: tuple[str, str]
):
    """Killed while the arena is copied over: its hashes do not match any more, those on the disk do."""
    child = playground.start(*local, *HOLD, HOLDFAST_KILL_AT="trainer.staged:4")
    assert child.wait() == -signal.SIGKILL, child.said()
    playground.check_finishes_like(uninterrupted, *local, said="restored step 6 ")


def test_without_its_keeper_a_run_resumes_from_the_local_disk(
    playground: Playground, uninterrupted: str, local: tuple[str, str]
):
    """Without memory the local folder is nearest."""
    kill_after(playground, 7, *local, "--home-every", "1000")
    playground.wait_for_keepers()
    playground.check_finishes_like(uninterrupted, *local, said=f"from {playground.local} (")


@pytest.mark.essential
def test_a_lost_host_resumes_from_home(playground: Playground, uninterrupted: str, local: tuple[str, str]):
    """Keepers and local disk gone: the newest complete checkpoint in home is restored."""
    child = playground.start("--step-s", "0.01", *ENDLESS, *local, "--home-every", "4", *HOLD)
    playground.wait_for(playground.complete, "a checkpoint in home")
    child.kill()
    child.wait()
    playground.kill_keepers()
    playground.wait_for_keepers()
    in_home = playground.complete()
    shutil.rmtree(playground.local)
    assert playground.check_all_complete_verify() == len(in_home) > 0
    second = playground.finish(*local)
    restored = re.search(rf"restored step (\d+) from {playground.home} \(", second.said())
    assert restored, second.said()
    assert int(restored[1]) >= in_home[0][1], "what lacks only its manifest is complete now, and newer"
    assert playground.final() == uninterrupted


def test_a_damaged_local_copy_is_recovered_from_home(
    playground: Playground, uninterrupted: str, local: tuple[str, str]
):
    """The same step, the damaged bytes from the other tier, and a line that says so."""
    kill_after(playground, 7, *local)
    playground.wait_for_keepers()  # an orphan brings home what it has
    assert playground.complete()[0] == playground.complete(playground.local)[0]
    damaged = max(playground.local.glob("step-*/*.safetensors"))
    flip_bit(damaged)
    second = playground.finish(*local)
    assert f"{damaged.name} is damaged in chunk" in second.said()
    assert f"restored step {int(damaged.parent.name[5:])} from" in second.said()
    assert playground.final() == uninterrupted


def test_only_due_saves_and_the_last_one_are_sent_home(playground: Playground, local: tuple[str, str]):
    """Each tier keeps its own number. A slow drain may skip one that is due, so training waits for each."""
    playground.finish(*local, "--home-every", "10", "--keep", "9", "--wait-home")
    assert [step for _, step in playground.complete()] == [TOTAL, 20, 10]
    assert [step for _, step in playground.complete(playground.local)] == [TOTAL, TOTAL - 2]
    assert playground.check_all_complete_verify() == 3
    assert playground.check_all_complete_verify(playground.local) == 2


def test_training_continues_while_home_is_unavailable(playground: Playground, local: tuple[str, str]):
    """Home vanishes and comes back: local saves continue, a warning is shown, and the drain catches up."""
    child = playground.start(*local, "--pause-at", "10", total=200)
    playground.wait_for(playground.complete, "a checkpoint in home")
    away = playground.folder / "away"
    playground.home.rename(away)
    playground.let_go(10)
    playground.wait_for(lambda: playground.complete(playground.local)[0][1] > 20, "local saves")
    playground.wait_for(lambda: playground.has_event("drain-failed", playground.local), "a failed drain")
    away.rename(playground.home)
    assert child.wait() == 0, child.said()
    assert "Home cannot be reached" in child.said()
    assert playground.complete()[0] == (1, 200)
    assert playground.check_all_complete_verify() > 0


def test_a_home_that_stays_unavailable_is_an_error_in_the_end(playground: Playground, local: tuple[str, str]):
    """After the user's own limit the next save raises; the local tier remains."""
    child = playground.start(*local, "--step-s", "0.01", "--patience", "0.2s", total=100_000)
    playground.wait_for(playground.complete, "a checkpoint in home")
    away = playground.folder / "away"
    playground.home.rename(away)
    assert child.wait() == 1, child.said()
    assert "is not in home" in child.said()
    away.rename(playground.home)
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify(playground.local) > 0


def test_each_rank_drains_its_own_files(playground: Playground, local: tuple[str, str]):
    """Two ranks: each sends its own files home, rank 0 the manifest, and killed ranks resume."""
    children = playground.start_ranks(2, *local, "--step-s", "0.01", *ENDLESS, *HOLD)
    playground.wait_for_steps(7, children[0])
    end(children)
    second = playground.finish_ranks(*local)
    assert "from memory" in second[0].said()
    assert playground.complete()[0][1] == TOTAL
    assert playground.check_all_complete_verify() > 0


def check_random_kills(
    playground: Playground, uninterrupted: str, local: tuple[str, str], seed: int, num_kills: int
) -> None:
    """Kill at random moments of drains; sometimes the host's disk is lost too."""
    draw = random.Random(seed)
    for _ in range(num_kills):
        kill_host_at_random(playground, draw, *local, "--home-every", "2", *HOLD)
    playground.finish(*local)
    assert playground.final() == uninterrupted
    assert playground.check_all_complete_verify() > 0
    assert playground.check_all_complete_verify(playground.local) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_kills"), [(0, 4), *((seed, 5) for seed in range(100, 120))])
def test_random_kills(
    playground: Playground, uninterrupted: str, local: tuple[str, str], seed: int, num_kills: int
):
    check_random_kills(playground, uninterrupted, local, seed, num_kills)
