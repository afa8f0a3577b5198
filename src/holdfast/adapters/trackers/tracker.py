"""Tracker of a training: rows of numbers, sent to a library by a thread that never stops the training."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import SupportsFloat, final

from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.stage import PendingScalar, copy_scalar
from holdfast.checkpoint.store import open_store
from holdfast.errors import InvalidInput, Preempted, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.environment import is_dry_run
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.units import parse_step
from holdfast.watch.report.open_metrics import metric_families
from holdfast.watch.report.summary import read_summary

OWN_PREFIX = "holdfast/"
"""Prefix of the numbers of the run itself."""


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Place of a row in a run."""

    run: str  # id of the run
    attempt: int  # that logs it
    step: int  # as the user counts


class TrackedRun(ABC):
    """Run of one library. All calls are made by one thread; any may raise any error of the library."""

    @abstractmethod
    def begin(self, place: RowPlace) -> None:
        """Start the run, or continue it. Called before the first row of each attempt."""

    @abstractmethod
    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        """Log a row, without the values of steps that the run has."""

    @abstractmethod
    def end(self, *, has_failed: bool) -> None:
        """Write what is buffered, and end the run."""


_NAMES = {
    "holdfast_restores": "restores",
    "holdfast_steps_lost": "steps_lost",
    "holdfast_goodput_ratio": "goodput",
    "holdfast_checkpoint_step": "checkpoint_step",
}
"""Names in a tracker of numbers that `holdfast metrics` has."""


def read_run_numbers(home: str) -> dict[str, float]:
    """Return the numbers of the run in a home, by their names in a tracker. Unknown ones are left out."""
    summary = read_summary(open_store(home))
    families = {one.name: one.samples for one in metric_families(summary, home)}
    found = {ours: float(families[name][0][1]) for name, ours in _NAMES.items() if name in families}
    found["saves"] = sum(
        value for labels, value in families.get("holdfast_saves", ()) if labels["outcome"] == "durable"
    )
    found["rollbacks"] = len(summary.rollbacks)
    return {OWN_PREFIX + name: value for name, value in found.items()}


_log = get_logger("adapters")
MAX_WAITING = 10_000
"""Rows that the library has not taken; older ones are dropped."""
NUMBERS_PERIOD_S = 30.0
"""Time between two readings of the run's own numbers."""
RETRY_S = 30.0
"""Time until the next try to start a run that could not be started."""
CLOSE_TIMEOUT_S = 60.0

_Values = dict[str, float | PendingScalar]


@final
class Tracker:
    """Numbers of a training for W&B, MLflow or TensorBoard, as one curve.

    Made by `attach_wandb`, `attach_mlflow` and `attach_tensorboard`. A thread of its own sends the rows, and
    every 30 s the numbers of the run's history: saves, restores, rollbacks, steps lost and goodput. An error
    of the library is a warning, the first time, and training continues. Only rank 0 logs; nothing is logged
    in the trials of `holdfast check`, `replay` and `tune`.

    Args:
        ckpt: Checkpointer of the training.
        run: run of the library.
        name: name of the library, for warnings.
    """

    def __init__(self, ckpt: Checkpointer, run: TrackedRun, *, name: str) -> None:
        self._ckpt, self._run, self._name = ckpt, run, name
        self._early: deque[tuple[int, _Values]] = deque(maxlen=MAX_WAITING)  # rows before the claim
        self._rows: SimpleQueue[tuple[RowPlace, _Values] | None] = SimpleQueue()  # None ends the thread
        self._num_dropped = 0
        self._problem: str | None = None
        self._has_warned = False
        self._closed = threading.Event()
        self._has_failed = False
        self._begun: tuple[str, int] | None = None
        self._next_numbers_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def log(self, values: Mapping[str, SupportsFloat], step: int) -> None:
        """Log numbers of a step. Call it on every rank; rank 0 sends them.

        What is logged before the run is claimed, which `steps` or the first `save` does, waits for that.

        Args:
            values: a number, or a tensor of one element, by name. No step waits for a device.
            step: the same count at every start, such as the step that `Checkpointer.steps` yields.

        Raises:
            InvalidInput: a value is not a number, `step` is not a whole number from 0, or the tracker is
                closed.

        Ranks: not collective.
        Blocks: no.
        """
        step = parse_step(step, "log()")
        if self._closed.is_set():
            raise InvalidInput("log() was called after close(). Nothing was logged.", step=step)
        if self._ckpt.rank != 0 or is_dry_run():
            return
        self._early.append((step, {name: copy_scalar(value, name) for name, value in values.items()}))
        self._release()
        self._warn_once()

    def _release(self) -> None:
        """Pass what was logged to the thread, once the run has an id."""
        run, attempt = self._ckpt.run_id, self._ckpt.attempt
        if run is None or attempt is None:
            return
        while self._early:
            step, values = self._early.popleft()
            self._rows.put((RowPlace(run, attempt, step), values))
        while self._rows.qsize() > MAX_WAITING:
            with suppress(Empty):  # the thread may have taken it meanwhile
                self._rows.get_nowait()
                self._num_dropped += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_all, name="holdfast-tracker", daemon=True)
            self._thread.start()

    def close(self, *, has_failed: bool = False, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what was logged, with the newest numbers of the run, and end.

        Args:
            has_failed: show the run as failed.
            timeout_s: longest wait for the library.

        Ranks: not collective.
        Blocks: until the library has taken everything, at most `timeout_s`.
        """
        if self._closed.is_set():
            return
        if self._early:
            self._release()
        self._has_failed = has_failed
        self._closed.set()
        self._rows.put(None)
        if self._thread is not None:
            with reported_if_slow(lambda: _log.info("waiting for %s to take the last numbers", self._name)):
                self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._note_problem(f"it did not end within {timeout_s:g} s")
        elif self._early:
            self._note_problem("the run was never claimed by a save, so nothing was sent")
        if self._num_dropped:
            self._note_problem(f"{self._num_dropped} rows were dropped, because too many waited")
        self._warn_once()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(has_failed=kind is not None and not isinstance(error, Preempted))

    # -- the thread ------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        place = None
        while (row := self._rows.get()) is not None:
            place = row[0]
            while not self._try(lambda row=row: self._send(*row)) and self._begun is None:
                if self._closed.is_set():
                    return  # the run could not be started, not even at the end
                self._closed.wait(RETRY_S)
            if time.monotonic() >= self._next_numbers_s:
                self._try(lambda place=place: self._send_numbers(place))
        if place is not None:
            self._try(lambda: self._send_numbers(place))
            self._try(lambda: self._run.end(has_failed=self._has_failed))

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a library raises must not stop the training
            self._note_problem(f"{type(error).__name__}: {error}")
            return False
        return True

    def _send(self, place: RowPlace, values: _Values) -> None:
        attempt = place.run, place.attempt
        if attempt != self._begun:
            self._run.begin(place)
            self._begun = attempt
        self._run.write(place, {name: _read(value) for name, value in values.items()})

    def _send_numbers(self, place: RowPlace) -> None:
        self._next_numbers_s = time.monotonic() + NUMBERS_PERIOD_S
        self._run.write(place, read_run_numbers(self._ckpt.home))

    # -- warnings --------------------------------------------------------------------------------------------

    def _note_problem(self, problem: str) -> None:
        """Keep the first problem for the thread that trains, which issues the warning."""
        if self._problem is None:
            self._problem = problem

    def _warn_once(self) -> None:
        if self._problem is not None and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._name} does not have all numbers of this training: {self._problem}. Training "
                "continues, and later problems of it are not reported. The history in home is complete.",
                SaveWarning,
            )


def _read(value: float | PendingScalar) -> float:
    return value.read() if isinstance(value, PendingScalar) else value
