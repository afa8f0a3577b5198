"""Hand-written loops that are killed or preempted, compared with unbroken ones of stock Accelerate."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs torch-holdfast[accelerate]")

import holdfast
from adapters import running

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "scripts" / "train.py"
train, train_ranks = functools.partial(running.train, SCRIPT), functools.partial(running.train_ranks, SCRIPT)
EXPLICIT = {"naming": "explicit", "every": 5}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "explicit": EXPLICIT,
    "seedable": {"loader": "seedable", "limit": 2},
    "stateful": {"loader": "stateful"},
    "accumulation": {"accumulation": 3, "every": 2},
    "scaler": {"scaler": True},
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, plan: dict[str, Any]) -> None:
    unbroken = train(tmp_path / "unbroken", stock=True, **plan)
    train(tmp_path / "out", status=-9, kill_at=18, **plan)
    assert train(tmp_path / "out", resume=True, **plan) == unbroken


@pytest.mark.parametrize(
    "plan", [{"every": 12}, {"every": 12, "loader": "stateful"}], ids=["plain", "stateful"]
)
def test_a_run_resumes_from_the_last_batch_of_an_epoch(tmp_path: Path, plan: dict[str, Any]) -> None:
    unbroken = train(tmp_path / "unbroken", stock=True, **plan)
    train(tmp_path / "out", status=-9, kill_at=14, **plan)
    assert train(tmp_path / "out", resume=True, **plan) == unbroken


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_resumes_within_its_first_pass(tmp_path: Path, workers: int) -> None:
    """Accelerate makes its first iterator when it prepares the loader, with random numbers of that moment."""
    plan: dict[str, Any] = {"loader": "stateful", "workers": workers}
    unbroken = train(tmp_path / "unbroken", stock=True, **plan)
    train(tmp_path / "out", status=-9, kill_at=9, **plan)
    assert train(tmp_path / "out", resume=True, **plan) == unbroken


def test_a_run_that_is_killed_again_and_again_resumes_bit_for_bit(tmp_path: Path) -> None:
    draw = random.Random(4)
    unbroken = train(tmp_path / "unbroken", stock=True, **EXPLICIT)
    step = 0
    while step < 22:
        step += draw.randint(5, 9)
        train(tmp_path / "out", status=-9, kill_at=step, resume=True, **EXPLICIT)
    assert train(tmp_path / "out", resume=True, **EXPLICIT) == unbroken


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("plan", [{}, {"loader": "seedable"}], ids=["ddp", "seedable"])
def test_two_ranks_resume_bit_for_bit(tmp_path: Path, plan: dict[str, Any], victim: int) -> None:
    unbroken = train_ranks(tmp_path / "unbroken", 2, stock=True, **plan)
    statuses = [-9 if rank == victim else 0 for rank in range(2)]
    train_ranks(tmp_path / "out", 2, statuses=statuses, kill_at=10, rank=victim, **plan)
    assert train_ranks(tmp_path / "out", 2, resume=True, **plan) == unbroken


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    train_ranks(tmp_path / "out", before, statuses=[-9] + [0] * (before - 1), kill_at=10)
    ended = train_ranks(tmp_path / "out", after, resume=True)
    assert ended[0]["counter"][0] == 30
    assert len({one["optimizer"] for one in ended}) == 1  # buffers of a batch norm are those of each rank


def add_rows(used: dict[tuple[int, int], list[int]], folder: Path) -> None:
    """Add the rows of a start by epoch and batch. A batch that is trained again replaces the first."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in folder.glob("rows*"):
        for line in path.read_text().splitlines():
            epoch, number, *rows = map(int, line.split())
            found.setdefault((epoch, number), []).extend(rows)
        path.unlink()
    used |= found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan", [{}, {"accumulation": 2}, {"workers": 2}], ids=["", "accumulation", "workers"]
)
@pytest.mark.parametrize("ranks", [(1, 1, 1), (1, 2, 1), (2, 1, 2)], ids=["1-1-1", "1-2-1", "2-1-2"])
def test_global_batches_use_each_row_once_on_another_number_of_ranks(
    tmp_path: Path, ranks: tuple[int, int, int], plan: dict[str, Any]
) -> None:
    used: dict[tuple[int, int], list[int]] = {}
    plan = {**plan, "loader": "global", "every": 2, "steps": 18}
    for count, kill_at in zip(ranks, [5, 9, 0], strict=True):
        statuses = [-9, 0][:count] if kill_at else None
        options = {**plan, "resume": kill_at != 5, "kill_at": kill_at}
        train_ranks(tmp_path / "out", count, statuses=statuses, **options)
        add_rows(used, tmp_path / "out")
    for epoch in range(3):
        rows = [row for (of, _), batch in used.items() if of == epoch for row in batch]
        assert sorted(rows) == list(range(48)), epoch


@pytest.mark.ranks
def test_two_ranks_with_global_batches_resume_bit_for_bit(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"loader": "global"}
    unbroken = train_ranks(tmp_path / "unbroken", 2, **plan)
    train_ranks(tmp_path / "out", 2, statuses=[-9, 0], kill_at=10, **plan)
    assert train_ranks(tmp_path / "out", 2, resume=True, **plan) == unbroken


def test_a_preempted_run_exits_with_75_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "unbroken", stock=True, **EXPLICIT)
    train(tmp_path / "out", status=75, kill_at=12, signal=15, **EXPLICIT)
    assert holdfast.open(tmp_path / "out" / "holdfast").step == 12
    ended = train(tmp_path / "out", resume=True, **EXPLICIT)
    assert {**ended, "iteration": 0} == {**unbroken, "iteration": 0}  # there is one folder more


def test_a_script_that_does_not_ask_is_preempted_at_its_next_save(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "unbroken", stock=True)
    train(tmp_path / "out", status=75, kill_at=9, signal=15, asks=False)
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == [
        *(f"checkpoint_{number}" for number in range(3)),
        "holdfast",
    ]
    assert train(tmp_path / "out", resume=True) == unbroken


def test_a_notice_to_the_loader_workers_too_costs_no_step(tmp_path: Path) -> None:
    plan: dict[str, Any] = {**EXPLICIT, "workers": 2}
    train(tmp_path / "out", status=75, kill_at=12, signal=15, group=True, **plan)
    assert holdfast.open(tmp_path / "out" / "holdfast").step == 12


def test_a_run_whose_workers_die_after_a_notice_exits_with_75(tmp_path: Path) -> None:
    """The script has not saved step 6, and only the script can."""
    plan: dict[str, Any] = {**EXPLICIT, "workers": 1, "asks": False, "slow_from": 28}
    train(tmp_path / "out", status=75, kill_at=6, signal=15, **plan)
    assert holdfast.open(tmp_path / "out" / "holdfast").step == 5


@pytest.mark.ranks
def test_two_ranks_agree_on_a_notice_that_one_of_them_gets(tmp_path: Path) -> None:
    unbroken = train_ranks(tmp_path / "unbroken", 2, stock=True)
    train_ranks(tmp_path / "out", 2, statuses=[75, 75], kill_at=9, signal=15, rank=1, asks=False)
    assert train_ranks(tmp_path / "out", 2, resume=True) == unbroken


def test_a_run_of_stock_accelerate_is_continued(tmp_path: Path) -> None:
    """Stock folders have no random numbers of a pass that has begun, so only the counters are compared."""
    unbroken = train(tmp_path / "unbroken", stock=True)
    train(tmp_path / "out", stock=True, status=-9, kill_at=10)
    train(tmp_path / "out", resume=True, status=-9, kill_at=18)
    ended = train(tmp_path / "out", resume=True)
    assert ended["counter"][:3] == unbroken["counter"][:3]
    assert ended["iteration"] == unbroken["iteration"]


@pytest.mark.parametrize("plan", [{}, {**EXPLICIT, "every": 6}], ids=["plain", "end of an epoch"])
def test_a_run_killed_after_its_last_save_trains_no_further_step(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    plan = {"steps": 24 if "every" in plan else 20, **plan}
    unbroken = train(tmp_path / "unbroken", stock=True, **plan)
    train(tmp_path / "out", status=-9, kill_at=plan["steps"], is_saved=True, **plan)
    assert train(tmp_path / "out", resume=True, **plan) == unbroken


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
