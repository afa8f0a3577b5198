"""Trainings that are killed anywhere and resumed equal an uninterrupted one bit for bit."""

# ruff: noqa: RUF012 - the tables of a suite are not changed

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import nursery
from adapters import running
from adapters.door_suite import KILLED, PREEMPTED, SIGTERM, DoorSuite, Plan
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.store import open_store
from stage.training import wait_until

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'torch-holdfast[lightning]'")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("training.py")
END_S = 300.0
train, train_ranks = functools.partial(running.train, SCRIPT), functools.partial(running.train_ranks, SCRIPT)
EVERYWHERE = [(5, "start"), (8, "end"), (1, "validation"), (1, "epoch")]
GLOBAL = {"every": 2, "data": "global"}


class TestLightning(DoorSuite):
    script = SCRIPT
    unbroken = {}
    home = "ckpt.holdfast"
    killed = {
        " ".join(f"{key}={value}" for key, value in plan.items()): (plan, EVERYWHERE)
        for plan in (
            *({"every": 2, "data": one} for one in ("map", "own-generator", "stateful", "stream", "workers")),
            *({"every": 2, "accumulate": one} for one in (2, 3)),
            GLOBAL,
            {**GLOBAL, "data": "global-stateful"},
            {**GLOBAL, "accumulate": 2},
            {**GLOBAL, "every": 7},
            {"every": 2, "val_interval": 0.5},
            {"every": 7},
            {"every": 3, "top_k": 2},
            *({"every": 2, "begin": one} for one in ("accumulation", "averaging")),
            {"every": None},
        )
    }
    of_ranks = {
        "plain": ({"every": 2}, EVERYWHERE[:2], 0),
        "global": (GLOBAL, [*EVERYWHERE[:2], (1, "epoch")], 0),
        "global accumulated": ({**GLOBAL, "accumulate": 2}, [*EVERYWHERE[:2], (1, "epoch")], 1),
    }
    preempted = {"plain": ({"every": 100}, 5)}
    ended = {"in an epoch": ({"every": 2, "max_steps": 10}, 10), "end of an epoch": ({"every": 7}, 21)}
    again = ({"every": 1, "top_k": 2}, (3, 7), 15)
    agreed = {"every": 100}

    def kills(self, place: Any) -> list[Plan]:
        return [{"status": KILLED, "kill_at": number, "where": where} for number, where in place]

    def step_of(self, end: dict[str, Any]) -> int:
        return end["step"]


@pytest.mark.parametrize(
    "plan", [GLOBAL, {**GLOBAL, "accumulate": 2}, {**GLOBAL, "data": "global-workers"}], ids=str
)
@pytest.mark.parametrize("ranks", [(1, 2, 1), (2, 1, 2)], ids=["1-2-1", "2-1-2"])
def test_global_batches_use_each_sample_once_on_another_number_of_ranks(
    tmp_path: Path, plan: Plan, ranks: tuple[int, int, int]
) -> None:
    used = running.UsedSamples()
    for count, kill_at in zip(ranks, [6, 9, 0], strict=True):
        statuses = [KILLED, 0][:count] if kill_at else None
        train_ranks(tmp_path, count, statuses=statuses, kill_at=kill_at, where="end", **plan)
        used.add(tmp_path, "samples*")
    used.check(56)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_continues_after_the_same_share_of_the_epoch(
    tmp_path: Path, first: int, second: int
) -> None:
    plan: Plan = {"every": 2, "data": "in-order"}
    train_ranks(tmp_path, first, statuses=[KILLED, 0][:first], kill_at=6 // first, where="end", **plan)
    before, used = running.UsedSamples(), running.UsedSamples()
    before.add(tmp_path, "samples*")
    train_ranks(tmp_path, second, **plan)
    used.add(tmp_path, "samples*")
    num_resumed = [len(used.of_epoch(epoch)) for epoch in range(3)]
    assert num_resumed[1:] == [56, 56]
    assert 0 < 56 - num_resumed[0] <= sum(map(len, before.by_batch.values()))


@pytest.mark.parametrize(
    ("plan", "breaks"),
    [
        # Their worker processes are new, so the random numbers that these draw differ.
        ({**GLOBAL, "data": "global-workers"}, [(KILLED, 5), (KILLED, 12)]),
        ({**GLOBAL, "every": 100, "accumulate": 2}, [(PREEMPTED, 5)]),
    ],
    ids=["workers", "sigterm"],
)
def test_global_batches_use_each_sample_once(
    tmp_path: Path, plan: Plan, breaks: list[tuple[int, int]]
) -> None:
    used = running.UsedSamples()
    for status, kill_at in [*breaks, (0, 0)]:
        number = SIGTERM if status == PREEMPTED else int(signal.SIGKILL)
        train(tmp_path, status=status, kill_at=kill_at, signal=number, **plan)
        used.add(tmp_path, "samples*")
    used.check(56)


def without_files(end: dict[str, Any]) -> dict[str, Any]:
    """Return the end of a run of which another number of files is left."""
    return {**end, "files": []}


@pytest.mark.parametrize("number", [1, 2])
def test_a_save_whose_keeper_was_killed_before_its_manifest_is_resumed_from(
    tmp_path: Path, number: int
) -> None:
    run, mark, step = tmp_path / "run", tmp_path / "mark", 2 * number
    unbroken = train(tmp_path / "unbroken", every=2)
    killer = {"HOLDFAST_KILL_AT": f"keeper.part:{number}", "HOLDFAST_KILL_MARK": str(mark)}
    train(run, status=KILLED, every=2, kill_at=step + 1, env=killer)
    wait_until(mark.exists)  # the keeper may reach the place after the trainer's end
    saved = list_home(open_store(str(run / "ckpt.holdfast"))).saved
    assert not saved[CheckpointId(attempt=1, step=step)].is_committed
    before = len((run / "log0").read_text().splitlines())
    assert without_files(train(run, every=2)) == without_files(unbroken)
    first = (run / "log0").read_text().splitlines()[before]
    assert first.startswith(f"(0, 0, {step}, {step}) ")


def test_sigterm_to_the_loader_workers_too_costs_no_step(tmp_path: Path) -> None:
    train(tmp_path, status=PREEMPTED, data="workers", every=100, kill_at=5, signal=SIGTERM, to_group=True)
    assert saved_step(tmp_path) == 5


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint."""
    return int(torch.load(folder / "ckpt" / "last.ckpt", weights_only=False)["global_step"])


@pytest.mark.parametrize(("data", "step"), [("slow", 3), ("slow-stream", 2)])
def test_the_last_complete_step_is_saved_if_workers_die_after_a_notice(
    tmp_path: Path, data: str, step: int
) -> None:
    """The stream has one batch fetched ahead, which is not trained."""
    plan: Plan = {"data": data, "every": 100}
    unbroken = train(tmp_path / "unbroken", **plan)
    train(tmp_path / "run", status=PREEMPTED, slow_from=3, **plan)
    assert saved_step(tmp_path / "run") == step
    assert without_files(train(tmp_path / "run", **plan)) == without_files(unbroken)


def test_the_example_killed_and_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[3] / "examples" / "06_lightning.py")
    ends = []
    for name, place in [("straight", ""), ("killed", "trainer.handed:3"), ("killed", "")]:
        env = {**os.environ, "HOLDFAST_KILL_AT": place, "PYTHONWARNINGS": "ignore"}
        ran = nursery.shared().run([script, str(tmp_path / name)], cwd=tmp_path, env=env, timeout_s=END_S)
        ends.append((ran.returncode, ran.stdout.splitlines()[-1:]))
    assert [status for status, _ in ends] == [0, -signal.SIGKILL, 0]
    assert ends[2] == ends[0]
