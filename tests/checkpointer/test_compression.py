"""Compressed uploads to a bucket behind a slow link: restored, verified, exported, killed, and deleted."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast import Home, Local
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.bucket import ObjectStore
from holdfast.cli import main
from holdfast.errors import InvalidInput
from servers import Server

SLOW = 3_000_000  # bytes per second, less than a core compresses
numbers = itertools.count()


@pytest.fixture
def url(s3: Server) -> str:
    return s3.home(f"compressed-{next(numbers)}", timeout="20")


class Training:
    """A small training, every step of which is saved and sent home."""

    def __init__(self, url: str, local: Path, keep: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 100))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.checkpointer = holdfast.Checkpointer(
            Home(url, compress=True, bandwidth=SLOW),
            {"model": self.model, "optimizer": self.optimizer},
            local=Local(local, keep=1),
            keep=keep,
            quiet=True,
        )

    def run(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(torch.ones(8, 300)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.save(step)
            self.checkpointer.wait()

    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]


def stored(url: str) -> dict[str, str]:
    """Return the data files and bases in a bucket, each with what a stranger reads behind its name."""
    store = open_store(url)
    assert isinstance(store, ObjectStore)
    names = [entry.name for entry in store.list() if entry.name.endswith(".safetensors")]
    files = store._compressed.files
    return {name: files[name].stored.removeprefix(name) if name in files else "" for name in names}


def restored(url: str, local: Path) -> tuple[int | None, Training]:
    """Restore on a host without a local folder."""
    shutil.rmtree(local, ignore_errors=True)
    training = Training(url, local)
    for parameter in training.model.parameters():
        parameter.data.zero_()
    with training.checkpointer as checkpointer:
        return checkpointer.restore(), training


def test_another_host_restores_what_was_sent_compressed(url: str, tmp_path: Path) -> None:
    training = Training(url, tmp_path / "local")
    with training.checkpointer:
        training.run(range(1, 4))
        (base,) = (tmp_path / "local" / "bases").iterdir()
        assert base.name == "rank-00000-a0001-step-00000002.safetensors"
    assert not (tmp_path / "local" / "bases").exists()
    names = stored(url)
    num_bytes = open_store(url).size("step-00000001/rank-00000-a0001.safetensors")
    assert names == {
        "step-00000001/rank-00000-a0001.safetensors": "",  # measures the link
        "step-00000002/rank-00000-a0001.safetensors": f".zst-{num_bytes}-none",
        "step-00000003/rank-00000-a0001.safetensors": f".zst-{num_bytes}-a0001-00000002",
        "bases/rank-00000-a0001-step-00000002.safetensors": f".zst-{num_bytes}-none",
    }
    step, other = restored(url, tmp_path / "other")
    assert step == 3
    assert all(map(torch.equal, other.state(), training.state()))


def test_commands_see_plain_files(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(url, tmp_path / "local")
    with training.checkpointer:
        training.run(range(1, 4))
    assert main(["verify", url]) == 0
    assert main(["export", url, str(tmp_path / "weights.safetensors")]) == 0
    capsys.readouterr()
    found = load_file(tmp_path / "weights.safetensors")
    weights = dict(training.model.named_parameters())
    assert all(any(torch.equal(weight, one) for one in found.values()) for weight in weights.values())


def test_a_damaged_compressed_file_is_detected_and_the_checkpoint_before_it_restored(
    url: str, tmp_path: Path
) -> None:
    with (training := Training(url, tmp_path / "local")).checkpointer:
        training.run(range(1, 4))
    store = open_store(url)
    assert isinstance(store, ObjectStore)
    list(store.list())
    name = store._compressed.files["step-00000003/rank-00000-a0001.safetensors"].stored
    data = bytearray(store.get(name))
    data[len(data) // 2] ^= 1
    store.put(name, data)
    assert not holdfast.open(url).verify().is_good
    step, _ = restored(url, tmp_path / "other")
    assert step == 2


def test_bases_go_with_the_last_file_that_needs_them(url: str, tmp_path: Path) -> None:
    with (training := Training(url, tmp_path / "local", keep=1)).checkpointer:
        training.run(range(1, 14))
    bases = sorted(name for name in stored(url) if name.startswith("bases/"))
    assert bases == [
        "bases/rank-00000-a0001-step-00000007.safetensors",
        "bases/rank-00000-a0001-step-00000012.safetensors",
    ]
    step, other = restored(url, tmp_path / "other")
    assert step == 13
    assert all(map(torch.equal, other.state(), training.state()))


def test_a_base_that_is_lost_on_the_disk_only_costs_bytes(url: str, tmp_path: Path) -> None:
    with (training := Training(url, tmp_path / "local")).checkpointer:
        training.run(range(1, 3))
        (base,) = (tmp_path / "local" / "bases").iterdir()
        base.unlink()
        training.run(range(3, 4))
    step, other = restored(url, tmp_path / "other")
    assert step == 3
    assert all(map(torch.equal, other.state(), training.state()))


def test_what_cannot_be_compressed_is_refused_at_the_start(url: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with pytest.raises(InvalidInput, match=r"Home\(compress=True\)"):
        holdfast.Checkpointer(Home(url, compress=True), state)
    with pytest.raises(InvalidInput, match=r"Home\(compress=True\)"):
        holdfast.Checkpointer(Home(tmp_path / "home", compress=True), state, local=tmp_path / "local")


KILLED = """
import sys
from pathlib import Path
from checkpointer.test_compression import Training
training = Training(sys.argv[1], Path(sys.argv[2]))
first = (training.checkpointer.restore() or 0) + 1
for step in range(first, first + 100):
    print(step, flush=True)
    training.run(range(step, step + 1))
"""


def test_killed_with_its_keeper_at_any_time_it_resumes_on_another_host(url: str, tmp_path: Path) -> None:
    for attempt in range(1, 4):
        local = tmp_path / f"local-{attempt}"  # each attempt is on a new host
        words = [sys.executable, "-W", "ignore", "-c", KILLED, url, str(local)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as child:
            assert child.stdout is not None
            steps = [int(child.stdout.readline()) for _ in range(2 + attempt)]
            trainer = psutil.Process(child.pid)
            for process in (*trainer.children(recursive=True), trainer):
                process.kill()
        found = holdfast.open(url).verify()
        assert found.is_good
        step, _ = restored(url, tmp_path / "other")
        assert step is not None
        assert step >= steps[-2]
