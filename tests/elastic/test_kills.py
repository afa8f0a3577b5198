"""FSDP2 on two ranks: trainers and keepers die alone and together, and the run ends right, bit for bit."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.trainer import Forkserver
from faults.playground import ENDLESS, Playground, kill
from nursery import Child
from servers import reserve_port

pytestmark = [pytest.mark.ranks, pytest.mark.fsdp2_on_cpu]

SLOWLY = ("--step-s", "0.01")


def a_playground(folder: Path) -> Playground:
    nursery: Any = Forkserver()
    return Playground(folder, nursery)


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    found = a_playground(tmp_path)
    yield found
    found.check_no_process_is_left()


def finish_ranks(playground: Playground, *options: str) -> list[Child]:
    """Run two ranks to the end."""
    children = playground.start_ranks(2, reserve_port(), *options)
    for child in children:
        status = child.wait()
        assert status == 0, f"ended with {status}:\n{child.said()}"
    return children


def end(children: list[Child]) -> None:
    """Kill what is left, as a launcher does when one rank has died."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()


def check_goes_on(playground: Playground, expected: str) -> None:
    """All that is called complete verifies, a new attempt restores it, and ends like an uninterrupted one."""
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 0
    children = finish_ranks(playground)
    assert "restored step" in children[0].said(), children[0].said()
    assert "skipped step" not in children[0].said(), children[0].said()
    assert playground.final() == expected
    assert playground.check_all_complete_verify() == 3


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the final state of two ranks that nothing happened to."""
    place = a_playground(tmp_path_factory.mktemp("uninterrupted"))
    finish_ranks(place)
    return place.final()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_killed_and_the_other_alive(playground: Playground, uninterrupted: str, victim: int) -> None:
    children = playground.start_ranks(2, reserve_port(), *SLOWLY, *ENDLESS)
    playground.wait_for_steps(7)
    playground.wait_for(playground.complete, "a checkpoint")
    children[victim].kill()
    assert children[victim].wait() == -signal.SIGKILL
    end([children[1 - victim]])
    check_goes_on(playground, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("num_keepers", [1, 2])
def test_killed_keepers_do_not_stop_training(
    playground: Playground, uninterrupted: str, num_keepers: int
) -> None:
    children = playground.start_ranks(2, reserve_port(), "--pause-at", "5", "--pause-at", "11")
    for num_steps in (5, 11):
        playground.wait_for_steps(num_steps)
        for keeper in playground.keepers()[:num_keepers]:
            kill(keeper)
        playground.let_go(num_steps)
    assert [child.wait() for child in children] == [0, 0], [child.said() for child in children]
    assert playground.final() == uninterrupted
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 0


@pytest.mark.slow
def test_a_trainer_and_all_keepers_killed_together(playground: Playground, uninterrupted: str) -> None:
    children = playground.start_ranks(2, reserve_port(), *SLOWLY, *ENDLESS)
    playground.wait_for(playground.complete, "a checkpoint")
    children[0].kill()
    assert playground.kill_keepers()
    end(children)
    check_goes_on(playground, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "victim"),
    [
        *itertools.product(
            [
                "trainer.staging",
                "trainer.staged",
                "trainer.handed",
                "keeper.received",
                "keeper.data",
                "keeper.part",
                "store.linked",
            ],
            [0, 1],
        ),
        ("keeper.manifest", 0),  # rank 0 alone commits and retains
        ("keeper.retain", 0),
    ],
)
def test_a_rank_killed_between_two_effects(
    playground: Playground, uninterrupted: str, victim: int, point: str, tmp_path: Path
) -> None:
    mark = tmp_path / "killed"
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    kill = {"HOLDFAST_KILL_AT": f"{point}:3", "HOLDFAST_KILL_MARK": str(mark)}
    children = []
    for rank in range(2):
        env: dict[str, Any] = {"RANK": str(rank), **world, **(kill if rank == victim else {})}
        children.append(playground.start(*SLOWLY, **env))
    playground.wait_for(lambda: mark.exists() or not children[victim].ended.empty(), "the kill")
    if point.startswith("trainer"):
        assert children[victim].wait() == -signal.SIGKILL
        end([children[1 - victim]])
        check_goes_on(playground, uninterrupted)
        return
    assert [child.wait() for child in children] == [0, 0], [child.said() for child in children]
    assert mark.exists()
    assert playground.final() == uninterrupted
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 0


def check_random_kills(playground: Playground, expected: str, seed: int, num_kills: int) -> None:
    draw = random.Random(seed)
    for _ in range(num_kills):
        children = playground.start_ranks(2, reserve_port(), *SLOWLY, "--every", "1")
        wanted = playground.num_steps() + draw.randint(1, 3)
        playground.wait_for_steps(wanted, children[0])
        playground.pause(draw.random() * 0.02)
        if draw.random() < 0.5:
            kill(draw.choice([*playground.keepers(), *children]))
        if draw.random() < 0.3:
            playground.kill_keepers()
        draw.choice(children).kill()
        end(children)
        playground.check_all_complete_verify()
    finish_ranks(playground)
    assert playground.final() == expected
    assert playground.check_all_complete_verify() > 0


@pytest.mark.essential
def test_random_kills(playground: Playground, uninterrupted: str) -> None:
    check_random_kills(playground, uninterrupted, seed=0, num_kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 306))
def test_many_random_kills(playground: Playground, uninterrupted: str, seed: int) -> None:
    check_random_kills(playground, uninterrupted, seed, num_kills=4)
