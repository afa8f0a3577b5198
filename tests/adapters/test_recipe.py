"""The guide's decorators with its own examples, kills, damage and wrong calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.damage import flip, middle
from holdfast.adapters.recipe import load_checkpoint, save_checkpoint
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.environment import read_progress
from nursery import shared

# The guide's functions, word for word.
GUIDE = """
import sys
from typing import Dict
import torch
from holdfast.adapters.recipe import load_checkpoint, save_checkpoint

@save_checkpoint(save_dir="checkpoints")
def save_model(step: int, model: torch.nn.Module):
    torch.save(model.state_dict(), f"checkpoints/model_{step}.pt")

@save_checkpoint(save_dir="checkpoints")
def save_training_state(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    torch.save({
        'model': model.state_dict(),
        'optimizer': optimizer.state_dict(),
        'step': step
    }, f"checkpoints/training_{step}.pt")

@save_checkpoint(save_dir="checkpoints", checkpoint_prefix="experiment1")
def save_with_metrics(step: int, model: torch.nn.Module, metrics: Dict[str, float]):
    torch.save({
        'model': model.state_dict(),
        'metrics': metrics,
        'step': step
    }, f"checkpoints/experiment1_step_{step}.pt")

@load_checkpoint(save_dir="checkpoints")
def load_model(step: int, model: torch.nn.Module):
    model.load_state_dict(torch.load(f"checkpoints/model_{step}.pt"))

@load_checkpoint(save_dir="checkpoints")
def load_training_state(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    checkpoint = torch.load(f"checkpoints/training_{step}.pt")
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    return checkpoint['step']

@load_checkpoint(save_dir="checkpoints", checkpoint_prefix="experiment1")
def load_with_metrics(step: int, model: torch.nn.Module):
    checkpoint = torch.load(f"checkpoints/experiment1_step_{step}.pt")
    model.load_state_dict(checkpoint['model'])
    return checkpoint['metrics']

model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
TRAIN = """
def train(step):
    model.weight.data.fill_(step)

first = load_training_state(0, model, optimizer)
start = 0 if first is None else first + 1
assert first is None or model.weight[0, 0] == first, (first, model.weight[0, 0])
print("start", start, flush=True)
for step in range(start, int(sys.argv[1])):
    train(step)
    save_training_state(step, model, optimizer)
"""


def run(folder: Path, code: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder."""
    return shared().run(["-c", GUIDE + code, *words], cwd=folder, env={**os.environ, **env})


class Functions:
    """Decorated functions that save and load a number, and record their calls."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.calls = folder, []
        loads = {key: value for key, value in options.items() if key != "max_checkpoints"}

        @save_checkpoint(save_dir=str(folder), **options)
        def save(step: int, value: Any) -> str:
            self.calls.append(("save", step))
            torch.save(value, folder / f"model_{step}.pt")
            return f"saved {step}"

        @load_checkpoint(save_dir=str(folder), **loads)
        def load(step: int) -> tuple[int, Any]:
            self.calls.append(("load", step))
            return step, torch.load(folder / f"model_{step}.pt", weights_only=True)

        self.save, self.load = save, load

    def fill(self, *steps: int) -> None:
        """Save ten times the number of each step."""
        for step in steps:
            self.save(step, step * 10)


def loader(folder: Path, read: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a decorated function that loads."""
    return load_checkpoint(save_dir=str(folder))(lambda step: read(step))


@pytest.fixture
def functions(tmp_path: Path) -> Functions:
    return Functions(tmp_path / "checkpoints")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_examples_of_the_guide_work(tmp_path: Path):
    """Each of the three pairs saves and loads; older steps are deleted with their metadata."""
    code = """
for step in range(8):
    model.weight.data.fill_(step)
    save_model(step, model)
    save_training_state(step, model, optimizer)
    save_with_metrics(step, model, metrics={"loss": step / 2})
model.weight.data.zero_()
assert load_training_state(0, model, optimizer) == 7
assert model.weight[0, 0] == 7
model.weight.data.zero_()
load_model(0, model=model)
assert model.weight[0, 0] == 7
model.weight.data.zero_()
assert load_with_metrics(step=0, model=model) == {"loss": 3.5}
assert model.weight[0, 0] == 7
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    kept = range(3, 8)
    assert names(tmp_path / "checkpoints") == {
        *(f"model_{step}.pt" for step in kept),
        *(f"training_{step}.pt" for step in kept),
        *(f"experiment1_step_{step}.pt" for step in kept),
        *(f"checkpoint_step_{step}_metadata.json" for step in kept),
        *(f"experiment1_step_{step}_metadata.json" for step in kept),
    }


KILL_IN_SAVE = """
import os, signal
whole = torch.save
def save(value, path):
    whole(value, path)
    if "_3." in str(path):
        data = open(path, "rb").read()
        open(path, "wb").write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = save
"""


def test_a_kill_during_a_save_falls_back_to_the_previous_step(tmp_path: Path):
    """The truncated file of step 3 exists, but is not a checkpoint."""
    done = run(tmp_path, KILL_IN_SAVE + TRAIN, "6")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "checkpoints" / "training_3.pt").exists()
    done = run(tmp_path, TRAIN, "6")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "start 3\n"
    assert run(tmp_path, TRAIN, "6").stdout == "start 6\n"


# Saves steps without torch, which takes long to start: from where the last start got to, up to a number.
PLAIN = """
import os, signal, sys
from holdfast.adapters.recipe import load_checkpoint, save_checkpoint

@save_checkpoint(save_dir="checkpoints")
def save(step, die=False):
    with open(f"checkpoints/state_{step}.txt", "w") as file:
        file.write(f"half of {step}")
        file.flush()
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(" and the other half")

@load_checkpoint(save_dir="checkpoints")
def load(step):
    text = open(f"checkpoints/state_{step}.txt").read()
    assert text == f"half of {step} and the other half"
    return step

last = load(0)
start = 0 if last is None else last + 1
if "again" in sys.argv:
    save(last, die=True)
print("start", start)
for step in range(start, int(sys.argv[1])):
    save(step)
"""


def run_plain(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script above."""
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, *words]
    return subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.parametrize("point", ["store.written", "store.synced", "store.linked"])
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_kill_while_the_metadata_is_written_leaves_a_step_complete_or_missing(
    tmp_path: Path, point: str, count: int
):
    done = run_plain(tmp_path, "5", HOLDFAST_KILL_AT=f"{point}:{count}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run_plain(tmp_path, "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"start {count if point == 'store.linked' else count - 1}\n"
    assert not [name for name in names(tmp_path / "checkpoints") if name.startswith(".")]


def test_a_step_survives_a_kill_while_it_is_saved_again(tmp_path: Path):
    """The old file is replaced only when the new one is complete."""
    assert run_plain(tmp_path, "4").returncode == 0
    assert run_plain(tmp_path, "4", "again").returncode == -signal.SIGKILL
    done = run_plain(tmp_path, "5")
    assert done.stdout == "start 4\n", done.stderr


def test_results_are_returned_and_nothing_runs_twice(functions: Functions):
    assert functions.load(0) is None
    assert functions.calls == []
    assert functions.save(1, 10) == "saved 1"
    assert functions.save(step=2, value=20) == "saved 2"
    assert functions.load(step=0) == (2, 20)
    assert functions.load(5) == (2, 20)
    assert functions.calls == [("save", 1), ("save", 2), ("load", 2), ("load", 2)]


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "fifo", "metadata", "no metadata"])
def test_damage_of_the_newest_falls_back_to_the_next(functions: Functions, damage: str):
    functions.fill(1, 2, 3)
    path = functions.folder / "model_3.pt"
    metadata = functions.folder / "checkpoint_step_3_metadata.json"
    if damage == "flip":
        flip(path, middle(path))
    elif damage in ("cut", "metadata"):
        cut = metadata if damage == "metadata" else path
        cut.write_bytes(cut.read_bytes()[:-1])
    else:
        (metadata if damage == "no metadata" else path).unlink()
    if damage == "fifo":
        os.mkfifo(path)
    assert functions.load(0) == (2, 20)
    assert functions.calls[-1] == ("load", 2)
    if damage != "fifo":
        functions.save(3, 33)
        assert functions.load(0) == (3, 33)


@pytest.mark.parametrize("name", ["../outside_2", "{0}", "link/outside_2", "a\0b"])
def test_metadata_that_names_files_elsewhere_moves_and_deletes_none(
    functions: Functions, tmp_path: Path, name: str
):
    """The folder may come from a stranger who knows the content of a file outside, and so its hash."""
    functions.fill(1, 2)
    outside = tmp_path / "outside_2"
    outside.write_bytes((functions.folder / "model_2.pt").read_bytes())
    (functions.folder / "link").symlink_to(tmp_path)
    metadata = functions.folder / "checkpoint_step_2_metadata.json"
    content = json.loads(metadata.read_text())
    content["files"][name.format(outside)] = content["files"]["model_2.pt"]
    metadata.write_text(json.dumps(content))
    assert functions.load(0) == (1, 10)
    functions.save(2, 21)
    assert functions.load(0) == (2, 21)
    metadata.write_text(json.dumps(content))
    pruning = Functions(functions.folder, max_checkpoints=1)
    pruning.save(3, 30)
    assert pruning.load(0) == (3, 30)
    assert outside.exists()
    assert names(tmp_path) == {"checkpoints", "outside_2"}


def test_an_error_is_raised_if_all_steps_are_damaged(functions: Functions):
    """A run must not silently start from scratch."""
    for step in (1, 2):
        functions.save(step, step)
        (functions.folder / f"model_{step}.pt").write_bytes(b"damaged")
    with pytest.raises(Corrupt, match=r"step 2: model_2\.pt is damaged") as caught:
        functions.load(0)
    assert "step 1: model_1.pt is damaged" in str(caught.value)
    assert ("load", 1) not in functions.calls


def test_errors_of_a_save_propagate_and_keep_the_earlier_step(tmp_path: Path):
    calls = []

    @save_checkpoint(save_dir=str(tmp_path))
    def save(step: int, fail: bool) -> None:
        calls.append(step)
        (tmp_path / f"state_{step}.bin").write_text(f"new {fail}")
        if fail:
            raise RuntimeError("the disk said no")

    load = loader(tmp_path, lambda step: (tmp_path / f"state_{step}.bin").read_text())
    save(1, False)
    with pytest.raises(RuntimeError, match="the disk said no"):
        save(1, True)
    with pytest.raises(RuntimeError, match="the disk said no"):
        save(2, True)
    assert calls == [1, 1, 2]
    assert load(0) == "new False"


@pytest.mark.parametrize("kind", [RuntimeError, FileNotFoundError])
def test_errors_of_a_load_propagate(functions: Functions, tmp_path: Path, kind: type[Exception]):
    """A model of another shape, or a missing file in another folder, must not fall back to an older step."""
    functions.fill(1, 2)
    tried = []

    def read(step: int) -> None:
        tried.append(step)
        if kind is FileNotFoundError:
            (tmp_path / "size mismatch").read_text()
        raise RuntimeError("size mismatch")

    with pytest.raises(kind, match="size mismatch"):
        loader(functions.folder, read)(0)
    assert tried == [2]


def test_a_step_without_the_file_of_another_function_is_skipped(tmp_path: Path):
    """After a kill between the saves of model and optimizer, the previous step is loaded."""
    a, b = Functions(tmp_path), []

    @save_checkpoint(save_dir=str(tmp_path))
    def save_optimizer(step: int, value: int) -> None:
        torch.save(value, tmp_path / f"optimizer_{step}.pt")

    @load_checkpoint(save_dir=str(tmp_path))
    def load_optimizer(step: int) -> int:
        b.append(step)
        return torch.load(tmp_path / f"optimizer_{step}.pt", weights_only=True)

    a.save(1, 1)
    save_optimizer(1, 100)
    a.save(2, 2)
    assert load_optimizer(0) == 100
    assert b == [2, 1]
    assert a.load(0) == (2, 2)


@pytest.mark.parametrize("max_checkpoints", [1, 2])
def test_pruning_keeps_the_newest_steps_and_the_one_just_saved(tmp_path: Path, max_checkpoints: int):
    """This also holds after going back, when the step just saved is not the greatest."""
    functions = Functions(tmp_path, max_checkpoints=max_checkpoints)
    functions.fill(5, 10, 15)
    kept = [10, 15][-max_checkpoints:]
    assert names(tmp_path) == {
        name for step in kept for name in (f"model_{step}.pt", f"checkpoint_step_{step}_metadata.json")
    }
    functions.save(7, 7)
    assert "model_7.pt" in names(tmp_path)
    assert len(names(tmp_path)) == 2 * max_checkpoints


def test_metadata_describes_the_save(functions: Functions):
    functions.save(1, 1)
    facts = json.loads((functions.folder / "checkpoint_step_1_metadata.json").read_text())
    assert (facts["step"], facts["model_type"], list(facts["files"])) == (1, "int", ["model_1.pt"])
    assert facts["files"]["model_1.pt"]["num_bytes"] == (functions.folder / "model_1.pt").stat().st_size


def test_checkpoints_of_the_guides_own_code_are_loaded(tmp_path: Path):
    """Its metadata has no hashes; a file that does not load is skipped, as in the guide."""
    for step in (1, 2):
        torch.save(step * 10, tmp_path / f"checkpoint_step_{step}.pt")
        (tmp_path / f"checkpoint_step_{step}_metadata.json").write_text(
            json.dumps({"step": step, "timestamp": "2026-01-01T00:00:00", "model_type": "NoneType"})
        )
    (tmp_path / "checkpoint_step_2.pt").write_bytes(b"torn")

    load = loader(
        tmp_path, lambda step: torch.load(tmp_path / f"checkpoint_step_{step}.pt", weights_only=True)
    )
    assert load(0) == 10


def test_a_file_without_the_step_in_its_name_is_refused(tmp_path: Path):
    @save_checkpoint(save_dir=str(tmp_path))
    def save(step: int) -> None:
        (tmp_path / "last.pt").write_text("each step the same name")

    with pytest.raises(InvalidInput, match=r"such as model_3\.pt"):
        save(3)


def test_file_names_may_have_folders_and_leading_zeros(tmp_path: Path):
    @save_checkpoint(save_dir=str(tmp_path), max_checkpoints=2)
    def save(step: int) -> None:
        folder = tmp_path / f"step-{step:06}"
        folder.mkdir(exist_ok=True)
        (folder / "model.bin").write_text(str(step))
        (folder / "optimizer.bin").write_text(str(step))

    load = loader(tmp_path, lambda step: (tmp_path / f"step-{step:06}" / "model.bin").read_text())
    for step in (1, 11, 111):
        save(step)
    assert load(0) == "111"
    (tmp_path / "step-000111" / "optimizer.bin").write_text("damaged")
    assert load(0) == "11"
    assert not (tmp_path / "step-000001").exists()


@pytest.mark.parametrize("step", [-1, True, "5", 1.5])
def test_a_step_must_be_a_whole_number(functions: Functions, step: Any):
    with pytest.raises(InvalidInput, match="whole number"):
        functions.save(step, 1)


def test_without_a_step_the_function_is_only_called(functions: Functions):
    assert functions.save(None, 1) == "saved None"  # type: ignore[arg-type]
    assert functions.load(0) is None
    with pytest.raises(InvalidInput, match="max_checkpoints"):
        save_checkpoint("checkpoints", max_checkpoints=0)
    with pytest.raises(InvalidInput, match="has no arguments"):
        load_checkpoint("checkpoints")(lambda: None)()


def test_steps_are_reported_to_the_job(
    functions: Functions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a job with progress is restarted after any number of preemptions."""
    progress = tmp_path / "progress"
    monkeypatch.setenv("HOLDFAST_PROGRESS", str(progress))
    functions.save(3, torch.ones(1))
    place = str(functions.folder / "checkpoint")
    assert read_progress(progress).steps == {place: 3}
    progress.unlink()
    with pytest.raises(InvalidInput):
        functions.save(-1, torch.ones(1))
    assert read_progress(progress).steps == {}
    assert functions.load(0) is not None
    assert read_progress(progress).steps == {place: 3}, (
        "of the restored step, with which later ones are compared"
    )
