"""The public suite of watches, and watches of users."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from typing_extensions import override

import holdfast
from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.watch import CopiedSave, RestoredState, Vote, Watch, WatchedRun
from holdfast.testing import WatchSuite


class Busy(Watch):
    """Watch with all events, and a section that it checks."""

    name: ClassVar[str] = "busy"
    keeper: ClassVar[str | None] = "watch.toy_keeper:BusyKeeper"

    @override
    def begin(self, run: WatchedRun) -> None:
        self.run, self.last = run, 0

    @override
    def restored(self, state: RestoredState) -> None:
        if state.section is not None and state.section.version == 1:
            assert state.section.data["trainer"] == state.step

    @override
    def recorded(self, step: int, values: Mapping[str, float]) -> None:
        assert step > self.last
        self.last = step

    @override
    def planned(self, tensors: Sequence[SharedTensor]) -> Copies | None:
        return None

    @override
    def step(self, step: int) -> Vote | None:
        self.run.words[0] = step

    @override
    def saving(self, save: CopiedSave) -> Section | None:
        assert self.last >= save.step
        return Section(1, {"trainer": save.step}, Mark.FOR, ("it is busy",))

    @override
    def saved(self, save: Save) -> None:
        assert save.durable

    @override
    def end(self, timeout_s: float | None) -> None:
        self.run.words[0] = 0


class TestBusy(WatchSuite):
    @pytest.fixture
    def watch(self) -> Watch:
        return Busy()


WATCHES: dict[type[Watch], Callable[[], Watch]] = {
    holdfast.Spike: holdfast.Spike,
    holdfast.FiniteValues: holdfast.FiniteValues,
    holdfast.HostMemory: lambda: holdfast.HostMemory(period="100ms"),
    holdfast.Hang: holdfast.Hang,
    holdfast.Replicas: holdfast.Replicas,
    holdfast.Preemption: lambda: holdfast.Preemption("none", signals=False),
}


class TestDefaultWatches(WatchSuite):
    @pytest.fixture(
        params=[
            *list(WATCHES.values())[:2],
            *(pytest.param(one, marks=pytest.mark.slow) for one in list(WATCHES.values())[2:]),
        ],
        ids=[one.__name__ for one in WATCHES],
    )
    def watch(self, request: pytest.FixtureRequest) -> Watch:
        return request.param()


def test_the_classes_are_those_of_the_default_watches() -> None:
    left = {type(one) for one in holdfast.default_watches()} - set(WATCHES)
    assert left == {holdfast.CompileCache, holdfast.SlowRanks}  # see tests/compiled and tests/pace


PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "write-a-watch.md"


def test_the_watch_of_the_page_stops_the_run_and_passes_the_suite(tmp_path: Path) -> None:
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.S):
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 75, done.stderr
    assert "accuracy has not improved since step 51" in done.stderr
    assert holdfast.open(tmp_path / "run").step == 81
    manifest = read_manifest(open_store(tmp_path / "run"), CheckpointId(attempt=1, step=80), None)
    assert manifest.watches["patience"].data == {"best": [0.5, 51]}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "resumes or torch", "."]
    suite = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert suite.returncode == 0, suite.stdout
    assert "2 passed" in suite.stdout
