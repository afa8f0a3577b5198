"""Profiles of scripts with planted faults, and of step functions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import InvalidInput
from holdfast.train.tuning.findings import TuningReport
from holdfast.train.tuning.script_profile import profile_script
from train.tuning.in_process import profile_step

SCRIPTS = Path(__file__).parent / "scripts"


def planted(script: Path) -> set[tuple[str, int]]:
    """Return kind and line of each fault, from the script's comments."""
    return {
        (kind, number)
        for number, line in enumerate(script.read_text().splitlines(), 1)
        for kind in re.findall(r"# fault: ([a-z ]*[a-z])", line)
    }


def found(report: TuningReport) -> set[tuple[str, int]]:
    return {(one.kind, one.place.line if one.place else 0) for one in report.findings}


@pytest.mark.slow
def test_syncs_breaks_and_recompiles_are_found_on_their_lines() -> None:
    script = SCRIPTS / "planted.py"
    report = profile_script(str(script), questions={"syncs"}, num_steps=9)
    wanted = {one for one in planted(script) if one[0] in ("sync", "graph break", "recompile")}
    assert len(wanted) == 8
    assert {one for one in found(report) if one[0] != "input"} == wanted
    assert report.unanswered == ()


@pytest.mark.slow
def test_exactly_the_planted_faults_are_found() -> None:
    script = SCRIPTS / "planted.py"
    report = profile_script(str(script))
    assert found(report) == planted(script)
    assert len(planted(script)) == 10
    assert report.unanswered == ()


@pytest.mark.slow
def test_the_advice_works() -> None:
    """The fixed script has no findings, and is several times as fast."""
    before = profile_script(str(SCRIPTS / "planted.py"), questions=())
    after = profile_script(str(SCRIPTS / "fixed.py"), questions={"syncs", "shapes", "input"})
    assert (found(after), after.unanswered) == (set(), ())
    assert after.throughput.items_per_s > 3 * before.throughput.items_per_s


@pytest.mark.slow
def test_a_clean_script_has_no_findings() -> None:
    report = profile_script(str(SCRIPTS / "clean.py"))
    kinds = {kind for kind, _ in found(report)}
    assert (kinds - {"compile"}, report.unanswered) == (set(), ())
    assert ("compile" in kinds) == any(one.pays for one in report.verdicts)  # not a fault, but a measurement
    assert report.verdicts


@pytest.mark.slow
def test_a_script_that_compiles_without_gain_is_a_finding() -> None:
    script = SCRIPTS / "compiled.py"
    report = profile_script(str(script), questions={"compile"})
    assert found(report) == planted(script)
    owns = [one for one in report.verdicts if one.variant == "own"]
    assert owns
    assert not any(one.pays for one in owns)


def test_a_profile_run_does_not_touch_the_training_run(tmp_path: Path) -> None:
    """It does not read or claim the home, `torch.save` is redirected, and `finally` still runs."""
    home, ended = tmp_path / "home", tmp_path / "ended"
    report = profile_script(str(SCRIPTS / "saving.py"), (str(home), str(ended)), questions=(), num_steps=3)
    assert len(report.steps.steps) == 3
    assert not home.exists()
    assert ended.read_text().startswith("restored")


SHORT = """
import os, sys, torch, holdfast
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param("raise SystemError('no such data')", "no such data", id="failing"),
        pytest.param("import os\nos.abort()", "exit status -6 before the measurements", id="aborted"),
        slow("print('nothing to do')", "without an optimizer step", id="without training"),
        *(
            slow(SHORT + leave, "ends after too few steps", id=leave)
            for leave in ("holdfast.hard_exit(0)", "os._exit(0)", "sys.exit(0)")
        ),
    ],
)
def test_a_script_that_cannot_be_measured_is_rejected(tmp_path: Path, code: str, message: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    with pytest.raises(InvalidInput, match=message):
        profile_script(str(script))


@pytest.mark.slow
@pytest.mark.ranks
def test_several_ranks_are_profiled_together() -> None:
    script = SCRIPTS / "ranks.py"
    report = profile_script(str(script), questions={"syncs", "compile"}, ranks=2, num_steps=6, timeout_s=600)
    assert planted(script) <= found(report)
    assert {kind for kind, _ in found(report)} <= {"sync", "compile"}
    assert report.unanswered == ()
    assert report.verdicts


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        if y.sum() > 1e9:
            y = y * 2
        return y


def training(model: nn.Module, *, reads: bool) -> Callable[[Any], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads:
            loss.item()

    return step


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_planted_lines_of_a_step_are_found() -> None:
    torch.manual_seed(0)
    report = profile_step(training(Net(), reads=True), [torch.randn(4, 8)] * 3, num_steps=4)
    assert {(one.kind, one.place.line) for one in report.findings if one.place} == {
        ("graph break", line_of(Net, "if y.sum()")),
        ("sync", line_of(training, "loss.item()")),
    }


def test_a_clean_step_has_no_findings() -> None:
    step = training(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), reads=False)
    report = profile_step(step, [torch.randn(4, 8)] * 3, num_steps=4)
    assert report.findings == ()
    assert report.unanswered == ()


@pytest.mark.slow
def test_compiled_steps_are_compared_with_eager_ones() -> None:
    step = training(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), reads=False)
    report = profile_step(step, [torch.randn(4, 8)] * 3, num_steps=4, variant="whole")
    (verdict,) = report.verdicts
    assert verdict.warm_up_s > 0
    assert not verdict.failure
