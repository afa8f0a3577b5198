"""What the demo does to a training run: kills, a damaged file, a preemption; and what came of it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import holdfast
from holdfast.cli.demo.child import Child
from holdfast.cli.demo.disk import Damage, RawWrite, flip_byte, write_raw
from holdfast.cli.history import Event, read_events
from holdfast.errors import HoldfastError, RetryLater
from holdfast.format import names, run
from holdfast.home.listing import candidates, list_home
from holdfast.keeper.presence import living
from holdfast.store import open_store

NUM_SAVES = 12
"""Saves of a run that nothing happens to; the failures are placed by them."""
_KEEPERS_LIMIT_S = 60.0


class Screen(Protocol):
    """Where the story is told while it happens; called by several threads."""

    def say(self, text: str) -> None:
        """Tell one event."""
        ...

    def said(self, line: str) -> None:
        """Repeat what a training has written to stderr."""
        ...

    def step(self, who: str, step: int, loss: float) -> None:
        """Show progress."""
        ...


@dataclass(frozen=True, slots=True)
class Blow:
    """One end of the survivor's process before its time."""

    what: str
    status: int  # exit status; -N if signal N ended it
    at_step: int  # the last step it had completed
    saving: int | None  # step whose save had no manifest yet when the signal was sent


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the survivor."""

    said: tuple[str, ...]
    first_step_s: float | None
    optimizer_s: dict[int, float]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a training that was left alone ended."""

    status: int
    step: int
    sha256: str | None


@dataclass(slots=True)
class Outcome:
    """All that was seen; what it proves is judged elsewhere."""

    steps: int
    every: int
    reference: Ending
    survivor: Ending
    blows: tuple[Blow, ...]
    starts: tuple[Start, ...]
    damage: Damage
    raw_writes: tuple[RawWrite, ...]
    done_step: int | None
    events: list[Event] = field(default_factory=list)
    problems: tuple[str, ...] | None = None  # of the last checkpoint; None if there is none

    def restored(self, attempt: int) -> Event | None:
        """The event in which an attempt tells what it has restored."""
        told = (e for e in self.events if e["event"] == "restored" and e.get("attempt") == attempt)
        return next(told, None)


class Story:
    """Two runs of one training: a reference that is left alone, and a survivor that is not.

    Args:
        folder: an empty folder for everything, or with `home` for what is on this machine.
        home: URL of an empty place that outlives the machine. The survivor then has its local tier in
            `folder`, and each failure takes that with it.
        steps: length of the training.
        num_bytes: size of a checkpoint, about.
        screen: where it is told.
    """

    def __init__(
        self, folder: Path, *, steps: int, num_bytes: int, screen: Screen, home: str | None = None
    ) -> None:
        self.near = folder / "survivor"  # where saves are complete first
        self.home = home or str(self.near)
        self.is_far = home is not None
        self.steps, self.every, self.num_bytes = steps, steps // NUM_SAVES, num_bytes
        self.folder, self.screen = folder, screen
        self.children: list[Child] = []
        self.blows: list[Blow] = []
        self.raw_writes: list[RawWrite] = []

    def tell(self) -> Outcome:
        """Let it happen.

        Raises:
            RetryLater: a training ended or hung where it should not; says where.
        """
        try:
            reference = self._start("reference")
            damage = self._strike()
            self.screen.say("survivor starts again, and is left alone now")
            survivor = self._start("survivor")
            endings = [_ending(survivor), _ending(reference)]
        finally:
            for child in self.children:
                child.end()
            self.wait_for_keepers()
        return self._outcome(endings[1], endings[0], damage)

    def _strike(self) -> Damage:
        """Everything that happens to the survivor."""
        self.screen.say("both trainings start: the reference without Holdfast, the survivor with it")
        child = self._start("survivor")
        self._write_raw_beside(child, self.every * 3 // 2)
        self._blow(child, signal.SIGKILL, "kill -9 while saving", saving_from=self.every * NUM_SAVES // 4)
        self.screen.say("survivor starts again")
        # With nothing held in memory: there the damaged file would still be whole.
        child = self._start("survivor", hold="0")
        self._write_raw_beside(child, self.every * NUM_SAVES // 4 + self.every // 2)
        at_step = self.every * NUM_SAVES * 5 // 12 + self.every * 3 // 4
        self._blow(child, signal.SIGKILL, "kill -9 between saves", at_step=at_step)
        damage = self._damage_newest()
        self.screen.say("survivor starts again")
        child = self._start("survivor")
        self._write_raw_beside(child, self.every * NUM_SAVES // 2)
        self._blow(
            child, signal.SIGTERM, "preempted while saving", saving_from=self.every * NUM_SAVES * 2 // 3
        )
        return damage

    def _start(self, who: str, *, hold: str = "1m") -> Child:
        options = ["--steps", str(self.steps), "--every", str(self.every), "--bytes", str(self.num_bytes)]
        if who == "survivor":
            options += ["--home", self.home, "--hold", "0" if self.is_far else hold]
            options += ["--local", str(self.near)] if self.is_far else []
        child = Child(
            who,
            options,
            on_step=lambda step, loss: self.screen.step(who, step, loss),
            on_line=self.screen.said,
        )
        self.children.append(child)
        return child

    def _blow(
        self,
        child: Child,
        number: signal.Signals,
        what: str,
        *,
        saving_from: int | None = None,
        at_step: int = 0,
    ) -> None:
        """Send a signal when the time has come, and see the process end."""
        saving = None
        if saving_from is None:
            child.wait_for(lambda: child.step >= at_step, f"step {at_step}")
        else:
            found: list[int] = []
            child.wait_for(
                lambda: found.extend(step for step in [self._unfinished(saving_from)] if step) or found,
                f"a save from step {saving_from} on",
            )
            saving = found[0]
        child.send(number)
        where = f"at step {child.step}" + (
            f", while the save of step {saving} was being written" if saving else ""
        )
        self.screen.say(f"{number.name} to the survivor {where}")
        status = child.wait()
        self.blows.append(Blow(what, status, child.step, saving))
        self.screen.say(f"survivor ended with {status} after step {child.step}")
        self.wait_for_keepers()
        if self.is_far:
            shutil.rmtree(self.near)
            self.screen.say("the machine's own folder is gone; what is left is in home")

    def _write_raw_beside(self, child: Child, at_step: int) -> None:
        """Time a raw write while both trainings run, as they do beside a keeper's write."""
        name = f"step {at_step}, with no save being written"
        child.wait_for(lambda: child.step >= at_step and self._unfinished(0) is None, name)
        self.raw_writes.append(write_raw(self.folder, self._data_bytes()))

    def _unfinished(self, from_step: int) -> int | None:
        """The newest step, if its save has begun to write and has no manifest yet."""
        newest = max((path.name for path in self.near.glob("step-*")), default="")
        files = list(_files(self.near / newest)) if newest >= names.step_dir(from_step) else []
        writing = any(path.suffix == ".safetensors" or path.name.startswith(".") for path in files)
        if not writing or any(path.name.startswith("manifest-") for path in files):
            return None
        return int(newest.removeprefix("step-"))

    def _data_bytes(self) -> int:
        sizes = [path.stat().st_size for path in self.near.glob("step-*/*.safetensors")]
        return max(sizes, default=self.num_bytes)

    def _damage_newest(self) -> Damage:
        store = open_store(self.home)
        attempt, step = candidates(list_home(store))[0]
        damage = flip_byte(store, names.data(step, attempt, 0), step=step, attempt=attempt)
        self.screen.say(
            f"damaged on purpose: byte {damage.offset:,} of {damage.name}, in the newest checkpoint"
        )
        return damage

    def wait_for_keepers(self) -> None:
        """Wait until no keeper works on the survivor's home any more.

        Raises:
            RetryLater: one is still there after a minute.
        """
        deadline = time.monotonic() + _KEEPERS_LIMIT_S
        while any(self.is_far or not trace.is_done for _, trace in living(self.home)):
            if time.monotonic() > deadline:
                raise RetryLater(f"A keeper of {self.home} has not ended after {_KEEPERS_LIMIT_S:.0f} s.")
            time.sleep(0.01)

    def _outcome(self, reference: Ending, survivor: Ending, damage: Damage) -> Outcome:
        store = open_store(self.home)
        starts = [
            Start(tuple(child.said), child.first_step_s, child.optimizer_s)
            for child in self.children
            if child.who == "survivor"
        ]
        outcome = Outcome(
            steps=self.steps,
            every=self.every,
            reference=reference,
            survivor=survivor,
            blows=tuple(self.blows),
            starts=tuple(starts),
            damage=damage,
            raw_writes=tuple(self.raw_writes),
            done_step=None,
            events=read_events(store)[0],
        )
        with contextlib.suppress(HoldfastError):  # then it stays unproven
            outcome.done_step = run.parse(run.Done, store.get(names.DONE), names.DONE).step
        with contextlib.suppress(HoldfastError):
            report = holdfast.open(self.home, step=self.steps).verify()
            outcome.problems = tuple(problem.message for problem in report.problems)
        return outcome


def _ending(child: Child) -> Ending:
    return Ending(child.wait(), child.step, child.sha256)


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except FileNotFoundError:
        return  # deleted since it was listed
