"""The examples, run as a reader does: from a shell, and killed where their text allows it."""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from cli.conftest import flip
from examples.running import EXAMPLES, LIMIT_S, environment
from nursery import shared
from servers import reserve_port

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_example(
    name: str, *arguments: object, launcher: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run one example to its end, whatever that is."""
    command = [*launcher, str(EXAMPLES / name), *map(str, arguments)]
    return shared().run(command, env={**environment(), **env}, timeout_s=LIMIT_S)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The result that an example prints last."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The home of a first example that nothing happened to, and its result."""
    home = tmp_path_factory.mktemp("first") / "home"
    return home, last_line(run_example("01_three_lines.py", home))


def check_killed(name: str, folder: Path, resumed: str, straight: str | None = None, **env: Any) -> None:
    """Kill an example in its third save, start it again, and compare its result with that of a whole run."""
    straight = straight or last_line(run_example(name, folder / "straight", **env))
    assert re.search(r"[0-9a-f]{64}", straight)
    killed = run_example(name, folder / "home", HOLDFAST_KILL_AT="trainer.handed:3", **env)
    assert killed.returncode == -signal.SIGKILL
    again = run_example(name, folder / "home", **env)
    assert resumed in again.stderr
    assert last_line(again) == straight


@pytest.mark.essential
def test_three_lines_killed_and_resumed_end_like_an_uninterrupted_run(
    first: tuple[Path, str], tmp_path: Path
) -> None:
    check_killed("01_three_lines.py", tmp_path, "restored step 300 from", straight=first[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "resumed"),
    [
        ("03_resume_dataloader.py", "restored step 75 from"),
        ("07_trainer.py", "resuming from step 60 of"),
        ("08_accelerate.py", "loaded step 2 of"),
        ("09_deepspeed.py", "resuming from global_step60: step 60 of"),
    ],
)
def test_an_example_killed_and_resumed_ends_like_an_uninterrupted_run(
    tmp_path: Path, name: str, resumed: str
) -> None:
    env: dict[str, str] = {}
    if name == "09_deepspeed.py":
        pytest.importorskip("deepspeed", reason="needs torch-holdfast[deepspeed]")
        env = {"DS_ACCELERATOR": "cpu", "MASTER_PORT": str(reserve_port())}
    check_killed(name, tmp_path, resumed, **env)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_killed_and_resumed_and_then_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kill = {"HOLDFAST_KILL_AT": "trainer.handed:3", "HOLDFAST_KILL_MARK": str(tmp_path / "mark")}
    killed = run_example("02_ddp.py", home, launcher=TORCHRUN, **kill)
    assert killed.returncode != 0
    assert (tmp_path / "mark").exists()
    assert "done" not in killed.stdout
    again = run_example("02_ddp.py", home, launcher=TORCHRUN)
    assert again.returncode == 0, again.stderr
    found = re.search(r"restored step (\d+) from", again.stderr)
    assert found
    # Whether the third save was complete depends on when the other rank fell.
    assert int(found[1]) in (100, 150)
    assert "step 300 on 2 ranks" in again.stdout
    assert "done" in again.stdout
    alone = run_example("02_ddp.py", home, 350)
    assert "finished at step 300; restored that step from" in alone.stderr
    assert last_line(alone) == "done"
    assert "step 350 on 1 ranks" in alone.stdout


def test_looking_inside_needs_no_model(first: tuple[Path, str], tmp_path: Path) -> None:
    exported = tmp_path / "all.safetensors"
    looked = run_example("04_look_inside.py", first[0], exported)
    assert looked.returncode == 0, looked.stderr
    lines = looked.stdout.splitlines()
    assert lines[0] == "step 1000, attempt 1, saved by 1 ranks"
    assert "  model.0.weight: F32 [256, 64], 65,536 bytes" in lines
    assert "learning rate 0.001" in lines
    assert re.search(r"^verified: [\d,]+ bytes, all good$", looked.stdout, re.M)
    assert exported.stat().st_size > 65_536


def test_looking_inside_reports_damage(first: tuple[Path, str], tmp_path: Path) -> None:
    home = shutil.copytree(first[0], tmp_path / "home")
    (file,) = (home / "step-00001000").glob("*.safetensors")
    flip(file)
    looked = run_example("04_look_inside.py", home)
    assert "damaged: " in looked.stdout
    assert "NOT good" in looked.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_sharded_training_killed_on_four_ranks_resumes_on_two_then_three(
    tmp_path: Path,
) -> None:
    """Each start restores its checkpoint, bit for bit."""
    home = tmp_path / "home"
    kill = {"HOLDFAST_KILL_AT": "trainer.handed:3", "HOLDFAST_KILL_MARK": str(tmp_path / "mark")}
    killed = run_example("05_fsdp2.py", home, launcher=on_ranks(4), **kill)
    assert killed.returncode != 0
    assert (tmp_path / "mark").exists()
    for num_ranks, total, restored in ((2, 40, {20, 30}), (3, 50, {40})):
        done = run_example("05_fsdp2.py", home, total, launcher=on_ranks(num_ranks))
        assert done.returncode == 0, done.stderr
        said = re.search(r"^step (\d+) on (\d) ranks: ([0-9a-f]{64})$", done.stdout, re.M)
        assert said, done.stdout
        step = int(said[1])
        assert step in restored
        assert int(said[2]) == num_ranks
        assert re.search(
            rf"restored step {step} from|finished at step {step}; restored that step", done.stderr
        )
        assert said[3] == digest_of(home, step)
    opened = last_line(run_example("05_fsdp2.py", "--open", home))
    assert opened == f"step 50, saved by 3 ranks: {digest_of(home, 50)}"


def on_ranks(count: int) -> tuple[str, ...]:
    """The launcher for so many ranks."""
    return (*TORCHRUN[:-1], str(count))


def digest_of(home: Path, step: int) -> str:
    """The digest of the tensors of model and optimizer in a checkpoint, by our own reading of its names."""
    tensors = holdfast.open(home, step=step).tensors()
    text = hashlib.sha256()
    for name in sorted(name for name in tensors if name.startswith(("model.", "optimizer."))):
        text.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()
