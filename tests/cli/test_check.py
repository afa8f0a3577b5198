"""`holdfast check` on real scripts: exact ones pass, and each planted fault is reported."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nursery import shared

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 600.0
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

START = """
import random, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import holdfast

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
data = TensorDataset(torch.arange(400.0).view(100, 4))

def train(inputs, scale=1.0):
    loss = model(inputs).square().mean() * scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""
LOOP = """
with holdfast.Checkpointer("home", state, every=1000) as ckpt:
    for step in ckpt.steps(40):
        {body}
"""
BY_HAND = """
ckpt = holdfast.Checkpointer("home", state, every=1000)
for step in range((ckpt.restore() or 0) + 1, 41):
    train(torch.randn(8, 4))
    if ckpt.should_save(step):
        ckpt.save(step)
ckpt.finish()
ckpt.close()
"""
SAVES_ONLY = """
ckpt = holdfast.Checkpointer("home", state)
for step in range((ckpt.restore() or 0) + 1, 41):
    train(torch.randn(8, 4))
    if step % 8 == 0:
        ckpt.save(step)
ckpt.close()
"""
SHUFFLED = """
def batches():
    while True:
        yield from DataLoader(data, batch_size=4, shuffle=True)
stream = batches()
""" + LOOP.format(body="train(next(stream)[0])")
COUNTER = "seen = 0\nstate['seen'] = seen\n" + LOOP.format(
    body="seen += 1; train(torch.randn(8, 4), 1 / seen)"
)
IGNORES = """
class Decay:
    def __init__(self):
        self.value = 1.0
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        pass
decay = state["decay"] = Decay()
""" + LOOP.format(body="decay.value *= 0.9; train(torch.randn(8, 4), decay.value)")
EMPTY = """
class Meter:
    def __init__(self):
        self.total = 0.0
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass
meter = state["meter"] = Meter()
""" + LOOP.format(body="meter.total += train(torch.randn(8, 4)).item()")
SCHEDULER = """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
""" + LOOP.format(body="train(torch.randn(8, 4)); scheduler.step()")
METRIC = """
class Mean(torch.nn.Module):  # as torchmetrics has it
    def __init__(self):
        super().__init__()
        self._defaults, self._persistent = {"total": 0}, {"total": False}
metric = state["metric"] = Mean()
""" + LOOP.format(body="train(torch.randn(8, 4))")
UNSEEDED = LOOP.format(body="train(torch.randn(8, 4) * random.random())")


def check(folder: Path, script: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the JSON report and stderr."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    command = ["-m", "holdfast.cli", "check", "--json", *(words or ("train.py",))]
    done = shared().run(command, cwd=folder, timeout_s=LIMIT_S)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.essential
def test_an_exact_script_passes_and_its_own_home_is_not_touched(tmp_path: Path) -> None:
    script = tmp_path / "script"
    status, report, result = check(
        script, START + LOOP.format(body="train(torch.randn(8, 4))"), "--", *shared().python, "train.py"
    )
    assert (status, report["exact"], report["deterministic"]) == (0, True, True), (report, result)
    steps = [report[name] for name in ("saved_at", "killed_at", "restored", "compared_at")]
    assert steps == [5, 7, 5, 10]
    assert report["num_compared"] > 10
    assert [path.name for path in script.iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [BY_HAND, SAVES_ONLY], ids=["by hand", "saves only"])
def test_hand_written_loops_pass(tmp_path: Path, script: str) -> None:
    status, report, result = check(tmp_path, START + script)
    assert status == 0, (report, result)
    assert report["restored"] < report["compared_at"]


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        pytest.param(SHUFFLED, "shuffled DataLoader over TensorDataset", id="shuffled"),
        slow(COUNTER, "a counter in a variable", id="counter"),
        slow(IGNORES, "a load_state_dict() that ignores a part", id="ignores"),
        slow(EMPTY, "meter is a Meter whose state_dict() is empty", id="empty"),
        slow(SCHEDULER, "a scheduler that is not in the state", id="scheduler"),
        slow(METRIC, "metric is a Mean whose state (total) is not persistent", id="metric"),
    ],
)
def test_each_fault_is_reported_with_its_probable_cause(tmp_path: Path, script: str, cause: str) -> None:
    status, report, result = check(tmp_path, START + script, "--", *shared().python, "train.py")
    assert (status, report["exact"], report["deterministic"]) == (1, False, True), result
    assert cause in " ".join(report["causes"])
    if script is SHUFFLED:
        assert cause in report["causes"][0]
        assert "another batch in step 6" in report["causes"][1]
        assert any(row["key"].startswith("model.") for row in report["differences"])


@pytest.mark.slow
def test_a_nondeterministic_script_is_reported(tmp_path: Path) -> None:
    status, report, result = check(tmp_path, START + UNSEEDED)
    assert (status, report["exact"], report["deterministic"]) == (1, False, False), result
    assert any(row["key"].startswith("model.") for row in report["random"])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "example"),
    [
        (["--steps", "20"], "01_three_lines.py"),
        (["--steps", "20"], "03_resume_dataloader.py"),
        (["--steps", "4", "--", *TORCHRUN], "02_ddp.py"),
    ],
    ids=["three lines", "data loader", "two ranks"],
)
def test_the_examples_pass(tmp_path: Path, words: list[str], example: str) -> None:
    status, report, result = check(tmp_path, "", *words, str(ROOT / "examples" / example))
    assert status == 0, (report, result)


def test_a_failing_script_shows_its_output(tmp_path: Path) -> None:
    script = START + "state['o'] = optimizer.state_dict()" + LOOP.format(body="pass")
    status, _, result = check(tmp_path, script, "--", *shared().python, "train.py")
    assert status == 2
    assert "Pass the optimizer itself" in result
