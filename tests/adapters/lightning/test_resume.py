"""Trainings that are killed anywhere and resumed equal an uninterrupted one bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

import nursery
from adapters.running import UsedSamples, run_ranks
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.store import open_store
from holdfast.errors import PREEMPTED_STATUS
from stage.training import wait_until

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'torch-holdfast[lightning]'")
pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).with_name("training.py"))
END_S = 300.0


@dataclass
class Ran:
    """What one start of a training left."""

    statuses: list[int]
    output: str

    @property
    def digests(self) -> list[str]:
        return sorted(re.findall(r"DIGEST (\w+)", self.output))


def start(folder: Path, *options: str, ranks: int = 1, killer: Mapping[str, str] | None = None) -> Ran:
    """Run the training; `killer` are environment variables that have a process killed at a failpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {"PYTHONWARNINGS": "ignore", "HOLDFAST_PREEMPTION": "none", **(killer or {})}
    if ranks > 1:
        env["TORCHELASTIC_RUN_ID"] = "test"
    ended = run_ranks([SCRIPT, folder, *options], ranks, env=env, is_launched=ranks > 1)
    return Ran([one.status for one in ended], "".join(one.output + one.errors for one in ended))


def files(folder: Path) -> list[str]:
    """Return the names of the checkpoints, and of what is left of incomplete ones."""
    return sorted(path.name for path in (folder / "ckpt").iterdir())


def batches(folder: Path, rank: int) -> dict[str, str]:
    """Return the loss of each batch; the last one counts of a batch that was trained again."""
    lines = (folder / f"log{rank}").read_text().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines)


@cache
def reference(folder: Path, options: tuple[str, ...], ranks: int) -> tuple[list[str], list[dict[str, str]]]:
    ran = start(folder, *options, ranks=ranks)
    assert ran.statuses == [0] * ranks, ran.output
    return ran.digests, [batches(folder, rank) for rank in range(ranks)]


def check(tmp_path: Path, options: list[str], kills: list[tuple[int, str]], ranks: int = 1) -> None:
    """Kill a training at each of the places, one start after the other, and compare."""
    digests, losses = reference(tmp_path / "reference", tuple(options), ranks)
    for count, where in kills:
        ran = start(tmp_path / "run", *options, f"--kill-at={count}", f"--where={where}", ranks=ranks)
        assert -signal.SIGKILL in ran.statuses, ran.output
    ran = start(tmp_path / "run", *options, ranks=ranks)
    assert ran.statuses == [0] * ranks, ran.output
    assert [batches(tmp_path / "run", rank) for rank in range(ranks)] == losses
    assert ran.digests == digests
    assert files(tmp_path / "run") == files(tmp_path / "reference")


@pytest.mark.parametrize(
    "options",
    [
        ["--every=2"],
        ["--every=2", "--data=own-generator"],
        ["--every=2", "--data=stateful"],
        ["--every=2", "--data=stream"],
        ["--every=2", "--data=workers"],
        ["--every=2", "--accumulate=2"],
        ["--every=2", "--accumulate=3"],
        ["--every=2", "--data=global"],
        ["--every=2", "--data=global-stateful"],
        ["--every=2", "--data=global", "--accumulate=2"],
        ["--every=7", "--data=global"],
        ["--every=2", "--val-interval=0.5"],
        ["--every=7"],
        ["--every=3", "--top-k=2"],
        ["--every=2", "--begin=accumulation"],
        ["--every=2", "--begin=averaging"],
        [],
    ],
    ids=" ".join,
)
def test_a_killed_training_resumes_bit_for_bit(tmp_path: Path, options: list[str]) -> None:
    check(tmp_path, options, [(5, "start"), (4, "end"), (1, "validation"), (1, "epoch")])


@pytest.mark.parametrize("options", [["--every=2", "--max-steps=10"], ["--every=7"]], ids=" ".join)
def test_a_training_killed_after_its_last_save_trains_no_further_step(
    tmp_path: Path, options: list[str]
) -> None:
    """Within an epoch, and at the end of one."""
    check(tmp_path, options, [(1, "training")])


@pytest.mark.parametrize(
    "options",
    [
        ["--every=2", "--data=global"],
        ["--every=2", "--data=global", "--accumulate=2"],
        ["--every=2", "--data=global-workers"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("ranks", [(1, 2, 1), (2, 1, 2)], ids=["1-2-1", "2-1-2"])
def test_global_batches_use_each_sample_once_on_another_number_of_ranks(
    tmp_path: Path, options: list[str], ranks: tuple[int, int, int]
) -> None:
    used = UsedSamples()
    runs = []
    for num, kill in zip(ranks, ["--kill-at=6", "--kill-at=4", "--kill-at=0"], strict=True):
        runs.append(start(tmp_path / "run", *options, kill, "--where=end", ranks=num))
        used.add(tmp_path / "run", "samples*")
    assert runs[-1].statuses == [0] * ranks[-1], runs[-1].output
    used.check(56)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_continues_after_the_same_share_of_the_epoch(
    tmp_path: Path, first: int, second: int
) -> None:
    options = ["--every=2", "--data=in-order"]
    start(tmp_path / "run", *options, f"--kill-at={6 // first}", "--where=end", ranks=first)
    before, used = UsedSamples(), UsedSamples()
    before.add(tmp_path / "run", "samples*")
    ran = start(tmp_path / "run", *options, ranks=second)
    assert ran.statuses == [0] * second, ran.output
    used.add(tmp_path / "run", "samples*")
    num_resumed = [len(used.of_epoch(epoch)) for epoch in range(3)]
    assert num_resumed[1:] == [56, 56]
    assert 0 < 56 - num_resumed[0] <= sum(map(len, before.by_batch.values()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_with_global_batches_resume_bit_for_bit(tmp_path: Path, accumulate: int) -> None:
    options = ["--every=2", "--data=global", f"--accumulate={accumulate}"]
    check(tmp_path, options, [(5, "start"), (4, "end"), (1, "epoch")], ranks=2)


def test_global_batches_with_workers_use_each_sample_once(tmp_path: Path) -> None:
    # Their worker processes are new, so the random numbers that these draw differ.
    used = UsedSamples()
    for kill in ["--kill-at=5", "--kill-at=9", "--kill-at=0"]:
        ran = start(tmp_path / "run", "--every=2", "--data=global-workers", kill)
        used.add(tmp_path / "run", "samples*")
    assert ran.statuses == [0], ran.output
    used.check(56)


def test_global_batches_resume_after_sigterm(tmp_path: Path) -> None:
    options, used = ["--every=100", "--data=global", "--accumulate=2"], UsedSamples()
    stopped = start(tmp_path / "run", *options, "--kill-at=5", f"--signal={int(signal.SIGTERM)}")
    assert stopped.statuses == [PREEMPTED_STATUS], stopped.output
    used.add(tmp_path / "run", "samples*")
    ran = start(tmp_path / "run", *options)
    assert ran.statuses == [0], ran.output
    used.add(tmp_path / "run", "samples*")
    used.check(56)


def test_two_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    check(tmp_path, ["--every=2"], [(5, "start"), (4, "end")], ranks=2)


@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kills = [(chance.randrange(1, 7), chance.choice(["start", "end"])) for _ in range(3)]
    check(tmp_path, ["--every=1", "--top-k=2"], kills)


@pytest.mark.parametrize("number", [1, 2])
def test_a_save_whose_keeper_was_killed_before_its_manifest_is_resumed_from(
    tmp_path: Path, number: int
) -> None:
    options, mark = ["--every=2"], tmp_path / "mark"
    digests, losses = reference(tmp_path / "reference", tuple(options), 1)
    step = 2 * number
    killer = {"HOLDFAST_KILL_AT": f"keeper.part:{number}", "HOLDFAST_KILL_MARK": str(mark)}
    ran = start(tmp_path / "run", *options, f"--kill-at={step + 1}", killer=killer)
    assert ran.statuses == [-signal.SIGKILL], ran.output
    wait_until(mark.exists)  # the keeper may reach the place after the trainer's end
    saved = list_home(open_store(str(tmp_path / "run" / "ckpt.holdfast"))).saved
    assert not saved[CheckpointId(attempt=1, step=step)].is_committed
    before = len((tmp_path / "run" / "log0").read_text().splitlines())
    ran = start(tmp_path / "run", *options)
    assert ran.statuses == [0], ran.output
    first = (tmp_path / "run" / "log0").read_text().splitlines()[before]
    assert first.startswith(f"(0, 0, {step}, {step}) ")
    assert ([batches(tmp_path / "run", 0)], ran.digests) == (losses, digests)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_exits_with_75(tmp_path: Path, ranks: int) -> None:
    options = ["--every=100"]
    digests, losses = reference(tmp_path / "reference", tuple(options), ranks)
    notice = ["--kill-at=5", f"--signal={int(signal.SIGTERM)}"]
    stopped = start(tmp_path / "run", *options, *notice, ranks=ranks)
    assert stopped.statuses == [PREEMPTED_STATUS] * ranks, stopped.output
    assert "last.ckpt" in os.listdir(tmp_path / "run" / "ckpt")  # noqa: PTH208
    ran = start(tmp_path / "run", *options, ranks=ranks)
    assert [batches(tmp_path / "run", rank) for rank in range(ranks)] == losses
    assert ran.digests == digests


def test_sigterm_to_the_loader_workers_too_costs_no_step(tmp_path: Path) -> None:
    notice = ["--data=workers", "--every=100", "--kill-at=5", f"--signal={int(signal.SIGTERM)}", "--to=group"]
    stopped = start(tmp_path / "run", *notice)
    assert stopped.statuses == [PREEMPTED_STATUS], stopped.output
    assert saved_step(tmp_path / "run") == 5


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint."""
    return int(torch.load(folder / "ckpt" / "last.ckpt", weights_only=False)["global_step"])


@pytest.mark.parametrize(("data", "step"), [("slow", 3), ("slow-stream", 2)])
def test_the_last_complete_step_is_saved_if_workers_die_after_a_notice(
    tmp_path: Path, data: str, step: int
) -> None:
    """The stream has one batch fetched ahead, which is not trained."""
    options = (f"--data={data}", "--every=100")
    digests, losses = reference(tmp_path / "reference", options, 1)
    stopped = start(tmp_path / "run", *options, "--slow-from=3")
    assert stopped.statuses == [PREEMPTED_STATUS], stopped.output
    assert saved_step(tmp_path / "run") == step
    ran = start(tmp_path / "run", *options)
    assert [batches(tmp_path / "run", 0)] == losses
    assert ran.digests == digests


def test_the_example_killed_and_resumed_ends_with_the_same_weights(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[3] / "examples" / "06_lightning.py")
    ends = []
    for name, place in [("straight", ""), ("killed", "trainer.handed:3"), ("killed", "")]:
        env = {**os.environ, "HOLDFAST_KILL_AT": place, "PYTHONWARNINGS": "ignore"}
        ran = nursery.shared().run([script, str(tmp_path / name)], cwd=tmp_path, env=env, timeout_s=END_S)
        ends.append((ran.returncode, ran.stdout.splitlines()[-1:]))
    assert [status for status, _ in ends] == [0, -signal.SIGKILL, 0]
    assert ends[2] == ends[0]
