"""Upgrades: the wheel of this source beside one of the same source as 0.2.0, on one home."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from release import packages

pytestmark = pytest.mark.slow

TRAIN = """
import hashlib, sys, torch, holdfast

home, total = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.Checkpointer(home, {"model": model, "optimizer": optimizer}, every=5) as ckpt:
    for step in ckpt.steps(total):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
print(holdfast.__version__, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""

KILLED = """
import os, signal, sys, torch, holdfast

state = {"tensor": torch.full((20_000_000,), 7.0)}
ckpt = holdfast.Checkpointer(sys.argv[1], state, every=None)
ckpt.save(3).wait_staged()
print(holdfast.__version__, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

RESUMED = """
import sys, torch, holdfast

state = {"tensor": torch.zeros(20_000_000)}
with holdfast.Checkpointer(sys.argv[1], state, every=None) as ckpt:
    print(holdfast.__version__, ckpt.restore(), bool((state["tensor"] == 7).all()))
    ckpt.save(4)
"""

UPGRADED = """
import os, signal, sys, torch, holdfast

home, installed, following = sys.argv[1:]
state = {"tensor": torch.zeros(1000)}
ckpt = holdfast.Checkpointer(home, state, every=None)
ckpt.save(1).wait_durable()
os.rename(installed, installed + ".old")
os.rename(following, installed)
os.kill(ckpt._training.attempt.keeper.pid, signal.SIGKILL)
try:
    ckpt.save(2).wait_durable(60)
except holdfast.HoldfastError as error:
    print(type(error).__name__, error)
os._exit(0)
"""

RANK = """
import sys, torch.distributed, holdfast

torch.distributed.init_process_group("gloo")
try:
    holdfast.Checkpointer(sys.argv[1], {"value": 1})
except holdfast.HoldfastError as error:
    print(holdfast.__version__, type(error).__name__, error)
"""


def test_a_home_goes_to_the_next_version_and_back(present: Path, following: Path, tmp_path: Path) -> None:
    def train(package: Path, home: str, total: int) -> list[str]:
        command = [sys.executable, "-c", TRAIN, str(tmp_path / home), str(total)]
        return packages.run(command, cwd=tmp_path, PYTHONPATH=str(package)).stdout.split()

    undisturbed = train(present, "undisturbed", 30)
    assert train(present, "home", 10)[0] == "0.1.0"
    assert train(following, "home", 20)[0] == "0.2.0"
    assert train(present, "home", 30) == undisturbed
    for package in (present, following):
        command = [sys.executable, "-m", "holdfast.cli", "verify", str(tmp_path / "home")]
        packages.run(command, cwd=tmp_path, PYTHONPATH=str(package))


@pytest.mark.parametrize("is_downgrade", [False, True])
def test_a_keeper_of_the_old_package_completes_its_save_for_a_trainer_of_the_new(
    present: Path, following: Path, tmp_path: Path, is_downgrade: bool
) -> None:
    first, second = (following, present) if is_downgrade else (present, following)
    home = str(tmp_path / "home")
    command = [sys.executable, "-c", KILLED, home]
    killed = packages.run(
        command, cwd=tmp_path, fails=True, PYTHONPATH=str(first), HOLDFAST_KEEP_IN_MEMORY="60s"
    )
    command = [sys.executable, "-c", RESUMED, home]
    resumed = packages.run(command, cwd=tmp_path, PYTHONPATH=str(second), HOLDFAST_KEEP_IN_MEMORY="60s")
    versions = ["0.2.0", "0.1.0"] if is_downgrade else ["0.1.0", "0.2.0"]
    assert [killed.stdout.split()[0], resumed.stdout.split()[0]] == versions
    assert resumed.stdout.split()[1:] == ["3", "True"]
    assert not holdfast.open(home, step=3).verify().problems
    assert holdfast.open(home).step == 4


def test_a_keeper_of_another_version_does_not_save_for_a_trainer(
    present: Path, following: Path, tmp_path: Path
) -> None:
    """The package is replaced while a training runs, and then its keeper is killed."""
    installed, other, home = tmp_path / "installed", tmp_path / "other", tmp_path / "home"
    shutil.copytree(present, installed)
    shutil.copytree(following, other)
    command = [sys.executable, "-c", UPGRADED, str(home), str(installed), str(other)]
    text = packages.run(command, cwd=tmp_path, PYTHONPATH=str(installed)).stdout
    assert text.startswith("RetryLater The keeper of rank 0")
    assert "The training runs with Holdfast 0.1.0, and 0.2.0 is installed now" in text
    assert "Start the training again" in text
    assert holdfast.open(home).step == 1
    assert not (home / "step-00000002" / "manifest.json").exists()


def test_ranks_of_different_versions_are_refused(present: Path, following: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "home")],
            env={
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                "PYTHONPATH": str(package),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, package in enumerate((present, following))
    ]
    texts = [process.communicate()[0] for process in ranks]
    for version, text in zip(("0.1.0", "0.2.0"), texts, strict=True):
        assert text.startswith(f"{version} Conflict The ranks run different versions of Holdfast")
        assert "0.1.0 on rank 0, 0.2.0 on rank 1" in text
    assert not list((tmp_path / "home").glob("*")) or not list((tmp_path / "home").glob("step-*"))
