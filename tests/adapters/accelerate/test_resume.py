"""Hand-written loops that are killed or preempted, compared with unbroken ones of stock Accelerate."""

# ruff: noqa: RUF012 - the tables of a suite are not changed

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs torch-holdfast[accelerate]")

import holdfast
from adapters import running
from adapters.door_suite import DoorSuite, Plan
from making import kept
from stage.training import wait_until

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "scripts" / "train.py"
train, train_ranks = functools.partial(running.train, SCRIPT), functools.partial(running.train_ranks, SCRIPT)
EXPLICIT = {"naming": "explicit", "every": 5}


class TestAccelerator(DoorSuite):
    script = SCRIPT
    killed = {
        "plain": ({}, 18),
        "explicit": (EXPLICIT, 18),
        "seedable": ({"loader": "seedable", "limit": 2}, 18),
        "stateful": ({"loader": "stateful"}, 18),
        "accumulation": ({"accumulation": 3, "every": 2}, 18),
        "scaler": ({"scaler": True}, 18),
        "last batch of an epoch": ({"every": 12}, 14),
        "last batch of a stateful loader": ({"every": 12, "loader": "stateful"}, 14),
        # Accelerate makes its first iterator when it prepares the loader, with random numbers of that moment.
        "first pass of a stateful loader": ({"loader": "stateful"}, 9),
        "first pass with a worker": ({"loader": "stateful", "workers": 1}, 9),
    }
    of_ranks = {
        f"{name} {victim}": (plan, 10, victim)
        for name, plan in {"ddp": {}, "seedable": {"loader": "seedable"}}.items()
        for victim in (0, 1)
    }
    ended = {"plain": ({"steps": 20}, 20), "end of an epoch": ({**EXPLICIT, "every": 6, "steps": 24}, 24)}
    preempted = {"explicit": (EXPLICIT, 12)}
    again = (EXPLICIT, (5, 9), 22)
    agreed = {"asks": False}

    def step_of(self, end: dict[str, Any]) -> int:
        return end["counter"][0]

    def check(self, folder: Path, plan: Plan, *breaks: Plan, **how: Any) -> list[dict[str, Any]]:
        self.has_more_folders = how.get("saved") is not None  # that of the notice
        return super().check(folder, plan, *breaks, **how)

    def compare(self, resumed: list[dict[str, Any]], unbroken: list[dict[str, Any]]) -> None:
        if self.has_more_folders:
            resumed, unbroken = ([{**one, "iteration": 0} for one in ends] for ends in (resumed, unbroken))
        super().compare(resumed, unbroken)


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    train_ranks(tmp_path / "out", before, statuses=[-9] + [0] * (before - 1), kill_at=10)
    ended = train_ranks(tmp_path / "out", after, resume=True)
    assert ended[0]["counter"][0] == 30
    assert len({one["optimizer"] for one in ended}) == 1  # buffers of a batch norm are those of each rank


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan", [{}, {"accumulation": 2}, {"workers": 2}], ids=["", "accumulation", "workers"]
)
@pytest.mark.parametrize("ranks", [(1, 1, 1), (1, 2, 1), (2, 1, 2)], ids=["1-1-1", "1-2-1", "2-1-2"])
def test_global_batches_use_each_row_once_on_another_number_of_ranks(
    tmp_path: Path, ranks: tuple[int, int, int], plan: dict[str, Any]
) -> None:
    used = running.UsedSamples()
    plan = {**plan, "loader": "global", "every": 2, "steps": 18}
    for count, kill_at in zip(ranks, [5, 9, 0], strict=True):
        statuses = [-9, 0][:count] if kill_at else None
        options = {**plan, "resume": kill_at != 5, "kill_at": kill_at}
        train_ranks(tmp_path / "out", count, statuses=statuses, **options)
        used.add(tmp_path / "out", "rows*")
    used.check(48)


@pytest.mark.ranks
def test_two_ranks_with_global_batches_resume_bit_for_bit(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"loader": "global"}
    unbroken = train_ranks(tmp_path / "unbroken", 2, **plan)
    train_ranks(tmp_path / "out", 2, statuses=[-9, 0], kill_at=10, **plan)
    assert train_ranks(tmp_path / "out", 2, resume=True, **plan) == unbroken


def test_a_script_that_does_not_ask_is_preempted_at_its_next_save(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "unbroken", stock=True)
    train(tmp_path / "out", status=75, kill_at=9, signal=15, asks=False)
    names = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert names == {*(f"checkpoint_{number}" for number in range(3)), "holdfast"}
    assert train(tmp_path / "out", resume=True) == unbroken


def test_a_notice_to_the_loader_workers_too_costs_no_step(tmp_path: Path) -> None:
    plan: dict[str, Any] = {**EXPLICIT, "workers": 2}
    train(tmp_path / "out", status=75, kill_at=12, signal=15, group=True, **plan)
    assert holdfast.open(tmp_path / "out" / "holdfast").step == 12


def test_a_run_whose_workers_die_after_a_notice_exits_with_75(tmp_path: Path) -> None:
    """The script has not saved step 6, and only the script can."""
    plan: dict[str, Any] = {**EXPLICIT, "workers": 1, "asks": False, "slow_from": 28}
    train(tmp_path / "out", status=75, kill_at=6, signal=15, **plan)
    wait_until(lambda: kept(tmp_path / "out" / "holdfast"))  # the keeper completes it
    assert holdfast.open(tmp_path / "out" / "holdfast").step == 5


def test_a_run_of_stock_accelerate_is_continued(tmp_path: Path) -> None:
    """Stock folders have no random numbers of a pass that has begun, so only the counters are compared."""
    unbroken = train(tmp_path / "unbroken", stock=True)
    train(tmp_path / "out", stock=True, status=-9, kill_at=10)
    train(tmp_path / "out", resume=True, status=-9, kill_at=18)
    ended = train(tmp_path / "out", resume=True)
    assert ended["counter"][:3] == unbroken["counter"][:3]
    assert ended["iteration"] == unbroken["iteration"]


@pytest.mark.parametrize("hook", [False, True])
def test_the_start_after_a_kill_before_any_change_leaves_the_files_of_an_unbroken_run(
    tmp_path: Path, hook: bool
) -> None:
    """Folders of deleted states are removed in several steps; a hook may have written to them."""
    plan: dict[str, Any] = {"limit": 2, "hook": hook}
    unbroken, begun, out = (tmp_path / name for name in ("unbroken", "begun", "out"))
    train(unbroken, steps=20, **plan)
    train(begun, steps=8, **plan)
    change = every = 6
    shutil.copytree(begun, out)
    while running.status_of(SCRIPT, out, steps=16, resume=True, kill_before=change, **plan) == -9:
        train(out, steps=20, resume=True, **plan)
        kept = "checkpoints/interrupted-checkpoint_2"  # files of a hook in a save that was not complete
        names = [name for name in running.names_of_states(out) if not name.startswith(kept)]
        assert names == running.names_of_states(unbroken), change
        shutil.rmtree(out)
        shutil.copytree(begun, out)
        change += every
    assert change > 5 * every
