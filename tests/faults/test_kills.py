"""Kills of any process at any time: complete checkpoints verify, and the resumed run ends correctly."""

from __future__ import annotations

import random
import signal

import pytest

from faults.playground import Playground
from holdfast.system.environment import read_progress
from holdfast.system.failpoint import POINTS


@pytest.mark.essential
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "point",
    [point for point in POINTS if not point.startswith(("writeback.", "compiled.", "jobs.", "rollback."))],
)
def test_a_kill_between_any_two_effects_loses_nothing(
    playground: Playground, uninterrupted: str, point: str, count: int
):
    """SIGKILL at each named place, in the one process that gets there first."""
    mark = playground.folder / "killed"
    options = ("--local", str(playground.local)) if point.startswith("keeper.drained") else ()
    child = playground.start(*options, HOLDFAST_KILL_AT=f"{point}:{count}", HOLDFAST_KILL_MARK=str(mark))
    status = child.wait()
    assert mark.exists(), f"nobody was killed at {point}:\n{child.said()}"
    assert status in (0, -signal.SIGKILL), child.said()
    playground.wait_for_keepers()
    playground.check_all_complete_verify()
    playground.finish(*options)
    assert playground.final() == uninterrupted
    assert playground.check_all_complete_verify() > 0


def check_random_kills(playground: Playground, uninterrupted: str, seed: int, num_kills: int) -> None:
    """Kill trainer, keeper or both at random moments, `num_kills` times; then let the run finish."""
    draw = random.Random(seed)
    for _ in range(num_kills):
        child = playground.start("--step-s", "0.01", "--every", "1")
        seen = playground.num_steps()
        playground.wait_for_steps(seen + draw.randint(0, 3), child)
        playground.pause(draw.random() * 0.03)
        victim = draw.choice(["trainer", "keeper", "both"])
        if victim != "trainer":
            playground.kill_keepers()
        if victim != "keeper":
            child.kill()
        if victim == "keeper":  # the trainer starts another one and goes on
            playground.wait_for_steps(playground.num_steps() + 2, child)
            child.kill()
        child.wait()
        playground.check_all_complete_verify()
    playground.finish()
    assert playground.final() == uninterrupted
    assert playground.check_all_complete_verify() > 0


@pytest.mark.parametrize(
    ("seed", "num_kills"),
    [
        pytest.param(0, 4, marks=pytest.mark.essential),
        *(pytest.param(seed, 5, marks=pytest.mark.slow) for seed in range(100, 140)),
    ],
)
def test_random_kills(playground: Playground, uninterrupted: str, seed: int, num_kills: int):
    """A few by default, and two hundred with the slow tests, five to a home."""
    check_random_kills(playground, uninterrupted, seed, num_kills)


def test_a_killed_trainer_loses_no_staged_save(playground: Playground):
    """The keeper completes the submitted save, although the trainer is killed at once, and its job knows."""
    reported = playground.folder / "progress"
    child = playground.start(
        "--every", "3", HOLDFAST_KILL_AT="trainer.handed:2", HOLDFAST_PROGRESS=str(reported)
    )
    assert child.wait() == -signal.SIGKILL
    playground.wait_for_keepers()
    assert playground.complete()[0] == (1, 6)
    assert playground.check_all_complete_verify() == 2
    assert list(read_progress(reported).steps.values()) == [6], "what `queue` and `describe` show"


def test_the_next_attempt_waits_for_a_keeper_that_is_still_at_work(playground: Playground):
    """A new attempt that starts at once restores what the dead one's keeper was still writing."""
    child = playground.start("--every", "3", "--width", "2000", HOLDFAST_KILL_AT="trainer.handed:2")
    assert child.wait() == -signal.SIGKILL
    second = playground.finish("--every", "3", "--width", "2000")
    assert "restored step 6 " in second.said()


def test_a_dead_keeper_is_reported_and_replaced(playground: Playground, uninterrupted: str):
    """The next save warns that the keeper died, and training ends like an uninterrupted run."""
    child = playground.start("--pause-at", "4")
    playground.wait_for_steps(4)
    assert playground.kill_keepers() == 1
    playground.let_go(4)
    assert child.wait() == 0, child.said()
    assert "died (SIGKILL)" in child.said()
    assert playground.final() == uninterrupted
    assert playground.check_all_complete_verify() == 3
