"""Two gloo ranks under DDP: ranks and keepers die one by one and together, and the run ends right."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from faults.playground import ENDLESS, Playground, kill
from nursery import Child
from servers import reserve_port

pytestmark = pytest.mark.ranks


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


def test_each_rank_writes_its_share_and_no_tensor_is_written_twice(playground: Playground):
    finish_ranks(playground, "--every", "24")
    files = sorted(path.name for path in (playground.home / "step-00000024").iterdir())
    assert files == [
        "manifest-a0001.json",
        "metrics-a0001.json",
        "rank-00000-a0001.json",
        "rank-00000-a0001.safetensors",
        "rank-00001-a0001.json",
        "rank-00001-a0001.safetensors",
    ]
    names = [set(), set()]
    from safetensors import safe_open

    for rank in range(2):
        path = playground.home / "step-00000024" / f"rank-{rank:05d}-a0001.safetensors"
        with safe_open(str(path), "pt") as file:
            names[rank] = {name.partition("@")[0] for name in file.keys()}  # noqa: SIM118 - not a mapping
    shared = {name for name in names[0] & names[1] if not name.startswith("rng.")}
    assert not shared
    assert any(name.startswith("model.") for name in names[0] | names[1])


@pytest.mark.essential
@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_killed(playground: Playground, uninterrupted_ranks: str, victim: int):
    """The launcher ends the other one; both resume from one step."""
    children = playground.start_ranks(2, reserve_port(), "--step-s", "0.01", *ENDLESS)
    playground.wait_for_steps(7)
    playground.wait_for(playground.complete, "a checkpoint")
    children[victim].kill()
    assert children[victim].wait() == -signal.SIGKILL
    end([children[1 - victim]])
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 0
    children = finish_ranks(playground)
    assert "restored step" in children[0].said()
    assert playground.final() == uninterrupted_ranks
    assert playground.check_all_complete_verify() == 3


PLACES = ("trainer.staged", "trainer.handed", "keeper.data", "keeper.part")
"""Failpoints that every rank reaches."""


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        *((point, number % 2) for number, point in enumerate(PLACES)),
        ("keeper.manifest", 0),  # rank 0 alone commits
        *(pytest.param(point, 1 - number % 2, marks=pytest.mark.slow) for number, point in enumerate(PLACES)),
    ],
)
def test_a_rank_killed_between_two_effects(
    playground: Playground, uninterrupted_ranks: str, victim: int, point: str, tmp_path: Path
):
    """A checkpoint that lacks a rank's part is never seen; one whose parts are all there is never lost."""
    mark = tmp_path / "killed"
    port = reserve_port()
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kill = {"HOLDFAST_KILL_AT": f"{point}:3", "HOLDFAST_KILL_MARK": str(mark)}
    env = [{"RANK": str(rank), **world, **(kill if rank == victim else {})} for rank in range(2)]
    children = [playground.start("--step-s", "0.01", **each) for each in env]  # pyright: ignore[reportArgumentType]
    if point.startswith("trainer"):
        assert children[victim].wait() == -signal.SIGKILL
        end([children[1 - victim]])
    else:
        assert [child.wait() for child in children] == [0, 0], [child.said() for child in children]
    playground.wait_for_keepers()
    assert mark.exists()
    assert playground.check_all_complete_verify() > 0
    finish_ranks(playground)
    assert playground.final() == uninterrupted_ranks


def check_random_rank_kills(playground: Playground, expected: str, seed: int, num_kills: int) -> None:
    draw = random.Random(seed)
    for _ in range(num_kills):
        children = playground.start_ranks(2, reserve_port(), "--step-s", "0.01", "--every", "1")
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
def test_random_kills_of_ranks(playground: Playground, uninterrupted_ranks: str):
    check_random_rank_kills(playground, uninterrupted_ranks, seed=0, num_kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 210))
def test_many_random_kills_of_ranks(playground: Playground, uninterrupted_ranks: str, seed: int):
    check_random_rank_kills(playground, uninterrupted_ranks, seed, num_kills=4)
