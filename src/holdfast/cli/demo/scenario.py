"""Scenario of the demo: kills, a damaged file and a preemption of a training, and its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

import holdfast
from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.keeper.lockfile import running_keepers
from holdfast.checkpoint.store import Store, open_store
from holdfast.cli.history import Event
from holdfast.errors import HoldfastError, RetryLater
from holdfast.system.entry import command
from holdfast.system.units import format_duration

if TYPE_CHECKING:
    from holdfast.cli.demo.screen import Screen

_T = TypeVar("_T")
_POLL_S = 0.001  # a save is in flight for less than a tenth of a second
_LIMIT_S = 300.0


class Start(Struct):
    """One start of a training: what it has sent so far, and its end."""

    name: str  # "reference" or "survivor"
    step: int = 0  # newest completed step
    status: int | None = None  # exit status, after its end; -N if signal N ended it
    sha256: str | None = None  # of weights and optimizer, after it has finished
    failure: str = ""  # name of the failure that ended it
    saving: int | None = None  # step of the save in progress at that failure
    output: list[str] = []  # all lines but facts
    first_step_s: float | None = None  # from its start to the end of its first step


class Child:
    """A running training, which a thread records and shows."""

    def __init__(self, name: str, options: list[str], screen: Screen) -> None:
        self.record = Start(name)
        self._screen = screen
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command(f"{__package__}.training", *options),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C interrupts only the demo, which ends its children
        )
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in map(str.rstrip, pipe):
                self._receive_line(line)

    def _receive_line(self, line: str) -> None:
        record = self.record
        try:
            facts = json.loads(line) if line.startswith("{") else {}
        except ValueError:
            facts = {}
        if "sha256" in facts:
            record.sha256 = facts["sha256"]
        elif "step" in facts:
            record.first_step_s = record.first_step_s or time.monotonic() - self._began
            record.step = facts["step"]
            self._screen.show_step(record.name, record.step, facts["loss"])
        else:
            record.output.append(line)
            self._screen.show_output(line)

    def wait_for(self, condition: Callable[[], _T], name: str) -> _T:
        """Wait until `condition()` is true, and return its value."""
        deadline = time.monotonic() + _LIMIT_S
        while not (found := condition()):
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                how = f"is still running after {format_duration(_LIMIT_S)}"
                how = how if status is None else f"ended with status {status}"
                tail = "\n".join(self.record.output[-20:])
                raise RetryLater(
                    f"The {self.record.name} of the demo {how}, before {name}. The end of its output:\n{tail}"
                )
            time.sleep(_POLL_S)
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is still running."""
        self._process.send_signal(number)

    def wait(self) -> Start:
        """Wait until the process has ended and all its output is received."""
        try:
            self.record.status = self._process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RetryLater(
                f"The {self.record.name} of the demo has not ended after {format_duration(_LIMIT_S)}."
            ) from error
        self._thread.join(_LIMIT_S)  # at the end of the pipe
        return self.record

    def end(self) -> None:
        """Kill the process, if it is still running."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Damage(Struct, frozen=True):
    """One changed byte."""

    step: int
    attempt: int
    name: str
    offset: int
    before: int
    after: int  # as read back


def flip_byte(store: Store, name: str, *, step: int, attempt: int) -> Damage:
    """Flip all bits of the byte in the middle of an object."""
    content = bytearray(store.get(name))
    offset = len(content) // 2
    before = content[offset]
    content[offset] ^= 0xFF
    store.put(name, content)
    return Damage(step, attempt, name, offset, before, after=store.get(name)[offset])


NUM_SAVES = 12
"""Number of saves of an uninterrupted run, which determines the steps of the failures."""
_KEEPERS_LIMIT_S = 60.0


class Failure(Struct, frozen=True):
    """A failure of the survivor. Times are in save intervals from the start of the run."""

    name: str
    number: signal.Signals
    at: float  # time of the signal, or of the first save that it may interrupt
    while_saving: bool = True
    hold: str = "1m"  # how long the keeper holds its memory after the end


_FAILURES = (
    Failure("kill -9 while saving", signal.SIGKILL, at=3),
    # Followed by damage. Without held memory, which would still have the undamaged file.
    Failure("kill -9 between saves", signal.SIGKILL, at=5.75, while_saving=False, hold="0"),
    Failure("preempted while saving", signal.SIGTERM, at=8),
)


class DemoOutcome(Struct):
    """Observations during the scenario."""

    steps: int
    every: int
    reference: Start
    starts: list[Start]  # of the survivor: three that failed, and the last
    damage: Damage
    done_step: int | None
    events: list[Event]
    problems: list[str] | None  # of the last checkpoint; None if it is missing

    def restored(self, attempt: int) -> Event:
        """Return the event of an attempt's restore, or an empty one."""
        found = (e for e in self.events if e["event"] == "restored" and e.get("attempt") == attempt)
        return next(found, {})


class Scenario:
    """Two runs of one training: a reference without failures, and a survivor with failures.

    All files are in `folder`. With `home`, the URL of an empty home in a bucket, the survivor has its local
    folder there, and each failure deletes it.
    """

    def __init__(
        self, folder: Path, *, steps: int, num_bytes: int, screen: Screen, home: str | None = None
    ) -> None:
        self.near = folder / "survivor"  # home, or local folder
        self.home = home or str(self.near)
        self.is_far = home is not None
        self.steps, self.every, self.num_bytes = steps, steps // NUM_SAVES, num_bytes
        self.folder, self.screen = folder, screen
        self.children: list[Child] = []

    def run(self) -> DemoOutcome:
        """Run the scenario."""
        try:
            reference = self._start("reference")
            damage = self._run_failures()
            self.screen.show_event("the survivor starts again, without further failures")
            self._start("survivor").wait()
            reference.wait()
        finally:
            for child in self.children:
                child.end()
            self.wait_for_keepers()
        return self._outcome(damage)

    def _run_failures(self) -> Damage:
        """Run the survivor up to its last failure."""
        self.screen.show_event("both trainings start: the reference without Holdfast, the survivor with it")
        damage = None
        for failure in _FAILURES:
            child = self._start("survivor", hold=failure.hold)
            self._fail(child, failure)
            if not failure.while_saving:
                damage = self._damage_newest()
            if failure is not _FAILURES[-1]:
                self.screen.show_event("the survivor starts again")
        assert damage is not None
        return damage

    def _start(self, name: str, *, hold: str = "1m") -> Child:
        options = ["--steps", str(self.steps), "--every", str(self.every), "--bytes", str(self.num_bytes)]
        if name == "survivor":
            options += ["--home", self.home, "--hold", "0" if self.is_far else hold]
            options += ["--local", str(self.near)] if self.is_far else []
        child = Child(name, options, self.screen)
        self.children.append(child)
        return child

    def _fail(self, child: Child, failure: Failure) -> None:
        """Send a signal at a step or during a save, and wait for the end."""
        record, step = child.record, int(self.every * failure.at)
        if failure.while_saving:
            name = f"a save of step {step} or later"
            record.saving = child.wait_for(lambda: self._unfinished(step), name)
        else:
            child.wait_for(lambda: record.step >= step, f"step {step}")
        child.send(failure.number)
        where = f"at step {record.step}"
        if record.saving:
            where += f", while the save of step {record.saving} was being written"
        self.screen.show_event(f"{failure.number.name} to the survivor {where}")
        record.failure = failure.name
        child.wait()
        self.screen.show_event(f"the survivor ended with status {record.status} after step {record.step}")
        self.wait_for_keepers()
        if self.is_far:
            shutil.rmtree(self.near)
            self.screen.show_event("the local folder is deleted; only the home is left")

    def _unfinished(self, from_step: int) -> int | None:
        """Return the newest step if its save is in progress."""
        newest = max((path.name for path in self.near.glob("step-*")), default="")
        files: list[Path] = []
        if newest >= names.step_dir(from_step):
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                files = list((self.near / newest).iterdir())
        writing = any(path.suffix == ".safetensors" or path.name.startswith(".") for path in files)
        if not writing or any(path.name.startswith("manifest-") for path in files):
            return None
        return int(newest.removeprefix("step-"))

    def _damage_newest(self) -> Damage:
        store = open_store(self.home)
        newest = candidates(list_home(store))[0]
        name = names.data(newest.step, newest.attempt, 0)
        damage = flip_byte(store, name, step=newest.step, attempt=newest.attempt)
        self.screen.show_event(
            f"damaged on purpose: byte {damage.offset:,} of {damage.name}, in the newest checkpoint"
        )
        return damage

    def wait_for_keepers(self) -> None:
        """Wait until all keepers of the survivor have ended."""
        deadline = time.monotonic() + _KEEPERS_LIMIT_S
        while any(self.is_far or not info.is_done for _, info in running_keepers(self.home)):
            if time.monotonic() > deadline:
                raise RetryLater(f"A keeper of {self.home} has not ended after {_KEEPERS_LIMIT_S:.0f} s.")
            time.sleep(0.01)

    def _outcome(self, damage: Damage) -> DemoOutcome:
        store = open_store(self.home)
        reference, *starts = (child.record for child in self.children)
        done_step = problems = None
        with contextlib.suppress(HoldfastError):  # then its claim fails
            done_step = run.parse(run.Done, store.get(names.DONE), names.DONE).step
        with contextlib.suppress(HoldfastError):
            report = holdfast.open(self.home, step=self.steps).verify()
            problems = [problem.message for problem in report.problems]
        events, _ = read_lines(store)
        return DemoOutcome(self.steps, self.every, reference, starts, damage, done_step, events, problems)
