"""Conformance tests of the seam of watches, for every implementation of `holdfast.Watch`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.watch import RestoredState, Watch, WatchedRun
from holdfast.errors import WatchWarning

EVENTS = ("begin", "restored", "recorded", "planned", "saving", "step", "saved", "end")
"""Events of a watch in the trainer that each run of the suite has."""
STEPS = 6


class WatchSuite:
    """Conformance suite. Subclass it and define a pytest fixture `watch` that returns a new watch.

    Its class must be importable by name, as a test here runs it in a process of its own.

    Example:
        >>> class TestMyWatch(WatchSuite):
        ...     @pytest.fixture
        ...     def watch(self):
        ...         return MyWatch()
    """

    def train(self, home: Path, *watches: Watch, steps: int = STEPS) -> int:
        """Train up to a number of steps, with a save after every second one. Return the first step."""
        state = {"weights": torch.zeros(8)}
        first = -1
        with holdfast.Checkpointer(
            home, state, every=2, keep=None, watches=watches, quiet=True, memory="64MiB"
        ) as ckpt:
            for step in ckpt.steps(steps):
                first = step if first < 0 else first
                state["weights"].add_(1)
                ckpt.record(loss=1.0 / (step + 1))
        return first

    def check(self, home: Path, step: int) -> None:
        """Check that the newest checkpoint is that of `step`, and is whole."""
        found = holdfast.open(home)
        assert found.step == step
        assert found.verify().is_good
        weights = torch.zeros(8)
        found.load_into({"weights": weights})
        assert weights.eq(step).all()

    def test_a_run_with_the_watch_resumes(self, tmp_path: Path, watch: Watch) -> None:
        """Every save is durable, and the next start continues."""
        assert self.train(tmp_path / "run", watch) == 0
        self.check(tmp_path / "run", STEPS)
        assert self.train(tmp_path / "run", watch, steps=STEPS + 2) == STEPS
        self.check(tmp_path / "run", STEPS + 2)

    def test_adding_and_removing_the_watch_does_not_break_a_resume(
        self, tmp_path: Path, watch: Watch
    ) -> None:
        """Sections of absent watches are kept, and absent sections are None."""
        home, others = tmp_path / "run", tmp_path / "others"
        self.train(home, watch)
        assert self.train(home, _switched_off(watch), steps=STEPS + 2) == STEPS
        self.train(others, _switched_off(watch))
        assert self.train(others, watch, steps=STEPS + 2) == STEPS
        self.check(home, STEPS + 2)
        self.check(others, STEPS + 2)

    @pytest.mark.parametrize("event", EVENTS)
    def test_an_error_in_an_event_switches_the_watch_off(
        self, tmp_path: Path, watch: Watch, event: str
    ) -> None:
        """Training and all saves complete, and one warning names the watch and the event."""
        if getattr(type(watch), event) is getattr(Watch, event):
            return  # the watch does not have it
        failing = _replaced(watch, event, _fail)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            self.train(tmp_path / "run", failing)
        texts = [str(one.message) for one in found if issubclass(one.category, WatchWarning)]
        named = [text for text in texts if f"{watch.name!r} has failed in {event}()" in text]
        if event in _called(watch, tmp_path / "seen", self.train):
            assert len(named) == 1, texts
        self.check(tmp_path / "run", STEPS)

    def test_a_watch_that_does_not_apply_costs_no_call(self, tmp_path: Path, watch: Watch) -> None:
        """After `applies` has returned False, no other event is called."""
        seen: list[str] = []
        off = _switched_off(watch)
        for event in EVENTS:
            off = _replaced(off, event, lambda *_, event=event, **__: seen.append(event))
        self.train(tmp_path / "run", off)
        assert seen == []

    @pytest.mark.parametrize("section", [None, Section(0), Section(10**6, {"new": [1]}, Mark.FOR, ("x",))])
    def test_any_section_is_taken(self, tmp_path: Path, watch: Watch, section: Section | None) -> None:
        """One that is absent, older or newer does not switch the watch off."""
        plain = type(watch).restored

        def restored(self: Watch, state: RestoredState) -> None:
            plain(self, RestoredState(state.step, section, state.is_rollback, state.values_before))

        self.train(tmp_path / "run", watch)
        with warnings.catch_warnings():
            warnings.simplefilter("error", WatchWarning)
            self.train(tmp_path / "run", _replaced(watch, "restored", restored), steps=STEPS + 2)
        self.check(tmp_path / "run", STEPS + 2)

    def test_a_section_that_is_too_large_is_left_out(self, tmp_path: Path, watch: Watch) -> None:
        """The save is durable without it."""
        large = _replaced(watch, "saving", lambda *_: Section(1, {"text": "x" * (2 << 20)}))
        with contextlib.suppress(WatchWarning), warnings.catch_warnings():
            warnings.simplefilter("ignore", WatchWarning)
            self.train(tmp_path / "run", large)
        self.check(tmp_path / "run", STEPS)

    @pytest.mark.parametrize("point", ["trainer.staged", "keeper.part", "keeper.manifest"])
    def test_a_kill_between_two_events_loses_nothing(self, tmp_path: Path, watch: Watch, point: str) -> None:
        """The trainer, or its keeper, is killed after a section was made: the next start resumes."""
        home, kind = tmp_path / "run", type(watch)
        script = (
            f"import sys; sys.path[:0] = {sys.path!r}; from pathlib import Path\n"
            "from holdfast.testing import WatchSuite\n"
            f"from {kind.__module__} import {kind.__qualname__} as kind\n"
            f"WatchSuite().train(Path({str(home)!r}), kind())\n"
        )
        mark = str(tmp_path / "killed")
        environment = {**os.environ, "HOLDFAST_KILL_AT": f"{point}:2", "HOLDFAST_KILL_MARK": mark}
        command = [sys.executable, "-I", "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
        assert Path(mark).exists()
        self.train(home, watch)
        self.check(home, STEPS)

    def test_the_half_in_the_keeper_imports_no_torch(self, watch: Watch) -> None:
        """A keeper starts in a moment, and stays small."""
        if watch.keeper is None:
            return
        module = watch.keeper.partition(":")[0]
        assert importlib.util.find_spec(module) is not None
        code = f"import sys; sys.path[:0] = {sys.path!r}; import {module}; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True, text=True)
        assert done.stdout.strip() == "False"

    def test_its_name_and_its_options_are_valid(self, watch: Watch) -> None:
        """The options of the half in the keeper are JSON, and the same after a round trip."""
        assert json.loads(json.dumps(dict(watch.options()))) == dict(watch.options())


def _fail(*_: Any, **__: Any) -> None:
    raise ValueError("as the suite has ordered")


def _replaced(watch: Watch, event: str, method: Callable[..., Any]) -> Watch:
    """Return the watch with another function as one of its events."""
    kind = type(watch)
    made = type(kind.__name__, (kind,), {event: method, "__module__": kind.__module__})
    found = made.__new__(made)
    found.__dict__.update(watch.__dict__)
    return found


def _switched_off(watch: Watch) -> Watch:
    def applies(_self: Watch, run: WatchedRun) -> bool:
        return False

    return _replaced(watch, "applies", applies)


def _called(watch: Watch, home: Path, train: Callable[..., int]) -> set[str]:
    """Return the events that a run calls."""
    seen: set[str] = set()
    for event in EVENTS:
        plain = getattr(type(watch), event)
        if plain is not getattr(Watch, event):

            def method(*arguments: Any, plain: Any = plain, event: str = event) -> Any:
                seen.add(event)
                return plain(*arguments)

            watch = _replaced(watch, event, method)
    train(home, watch)
    return seen
