"""Two ranks under DDP or FSDP2: trainers and keepers die alone and together, and the run ends right."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from faults.playground import ENDLESS, Playground, check_random_rank_kills, end, kill
from nursery import Nursery

pytestmark = pytest.mark.ranks

SLOWLY = ("--step-s", "0.01")
OPTIONS = {"ddp": (), "fsdp2": ("--fsdp", "--width", "33")}  # of which two ranks hold unequal shards
FSDP2 = pytest.param("fsdp2", marks=pytest.mark.fsdp2_on_cpu)


@pytest.fixture(scope="session")
def uninterrupted_fsdp2(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = Playground(tmp_path_factory.mktemp("uninterrupted"), nursery, *OPTIONS["fsdp2"])
    place.finish_ranks()
    return place.final()


@pytest.fixture
def expected(playground: Playground, layout: str, request: pytest.FixtureRequest) -> str:
    """Have trainers use a layout, and return the digest of two of them that nothing happened to."""
    playground.options = OPTIONS[layout]
    return request.getfixturevalue("uninterrupted_ranks" if layout == "ddp" else "uninterrupted_fsdp2")


def check_goes_on(playground: Playground, expected: str) -> None:
    """All that is called complete verifies, a new attempt restores it, and ends like an uninterrupted one."""
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 0
    children = playground.finish_ranks()
    assert "restored step" in children[0].said(), children[0].said()
    assert "skipped step" not in children[0].said(), children[0].said()
    assert playground.final() == expected
    assert playground.check_all_complete_verify() == 3


def test_each_rank_writes_its_share_and_no_tensor_is_written_twice(playground: Playground):
    playground.finish_ranks("--every", "24")
    folder = playground.home / "step-00000024"
    data = [f"rank-{rank:05d}-a0001.safetensors" for rank in range(2)]
    documents = [f"{name}-a0001.json" for name in ("manifest", "metrics", "rank-00000", "rank-00001")]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*data, *documents])
    one, other = ({key.partition("@")[0] for key in load_file(folder / name)} for name in data)
    assert not {name for name in one & other if not name.startswith("rng.")}
    assert any(name.startswith("model.") for name in one | other)


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        pytest.param("ddp", 0, marks=pytest.mark.essential),
        pytest.param("ddp", 1, marks=pytest.mark.essential),
        pytest.param("fsdp2", 0, marks=[pytest.mark.fsdp2_on_cpu, pytest.mark.slow]),
        pytest.param("fsdp2", 1, marks=pytest.mark.fsdp2_on_cpu),
    ],
)
def test_one_rank_killed(playground: Playground, expected: str, victim: int):
    """The launcher ends the other one; both resume from one step."""
    children = playground.start_ranks(2, *SLOWLY, *ENDLESS)
    playground.wait_for_steps(7)
    playground.wait_for(playground.complete, "a checkpoint")
    children[victim].kill()
    assert children[victim].wait() == -signal.SIGKILL
    end([children[1 - victim]])
    check_goes_on(playground, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FSDP2])
@pytest.mark.parametrize("num_keepers", [1, 2])
def test_killed_keepers_do_not_stop_training(playground: Playground, expected: str, num_keepers: int):
    children = playground.start_ranks(2, "--pause-at", "5", "--pause-at", "11")
    for num_steps in (5, 11):
        playground.wait_for_steps(num_steps)
        for keeper in playground.keepers()[:num_keepers]:
            kill(keeper)
        playground.let_go(num_steps)
    assert [child.wait() for child in children] == [0, 0], [child.said() for child in children]
    assert playground.final() == expected
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FSDP2])
def test_a_trainer_and_all_keepers_killed_together(playground: Playground, expected: str):
    children = playground.start_ranks(2, *SLOWLY, *ENDLESS)
    playground.wait_for(playground.complete, "a checkpoint")
    children[0].kill()
    assert playground.kill_keepers()
    end(children)
    check_goes_on(playground, expected)


PLACES = ("trainer.staged", "trainer.handed", "keeper.data", "keeper.part")
"""Failpoints that every rank reaches."""
MORE_PLACES = (*PLACES, "trainer.staging", "keeper.received", "store.linked")


@pytest.mark.parametrize(
    ("layout", "point", "victim"),
    [
        *(("ddp", point, number % 2) for number, point in enumerate(PLACES)),
        ("ddp", "keeper.manifest", 0),  # rank 0 alone commits and retains
        *(
            pytest.param("ddp", point, 1 - number % 2, marks=pytest.mark.slow)
            for number, point in enumerate(PLACES)
        ),
        *(
            pytest.param("fsdp2", *row, marks=[pytest.mark.fsdp2_on_cpu, pytest.mark.slow])
            for row in (*itertools.product(MORE_PLACES, (0, 1)), ("keeper.manifest", 0), ("keeper.retain", 0))
        ),
    ],
)
def test_a_rank_killed_between_two_effects(
    playground: Playground, expected: str, victim: int, point: str, tmp_path: Path
):
    """A checkpoint that lacks a rank's part is never seen; one whose parts are all there is never lost."""
    mark = tmp_path / "killed"
    kill = {"HOLDFAST_KILL_AT": f"{point}:3", "HOLDFAST_KILL_MARK": str(mark)}
    children = playground.start_ranks(2, *SLOWLY, envs={victim: kill})
    playground.wait_for(lambda: mark.exists() or not children[victim].ended.empty(), "the kill")
    if point.startswith("trainer"):
        assert children[victim].wait() == -signal.SIGKILL
        end([children[1 - victim]])
        check_goes_on(playground, expected)
        return
    assert [child.wait() for child in children] == [0, 0], [child.said() for child in children]
    playground.wait_for_keepers()
    assert mark.exists()
    assert playground.check_all_complete_verify() > 0
    playground.finish_ranks()
    assert playground.final() == expected


@pytest.mark.parametrize(
    ("layout", "seed", "num_kills"),
    [
        pytest.param("ddp", 0, 3, marks=pytest.mark.essential),
        pytest.param("fsdp2", 0, 2, marks=[pytest.mark.fsdp2_on_cpu, pytest.mark.essential]),
        *(pytest.param("ddp", seed, 4, marks=pytest.mark.slow) for seed in range(200, 210)),
        *(
            pytest.param("fsdp2", seed, 4, marks=[pytest.mark.fsdp2_on_cpu, pytest.mark.slow])
            for seed in range(300, 306)
        ),
    ],
)
def test_random_kills_of_ranks(playground: Playground, expected: str, seed: int, num_kills: int):
    check_random_rank_kills(playground, expected, seed, num_kills)
