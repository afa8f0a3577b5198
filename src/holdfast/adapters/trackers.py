"""Experiment trackers: W&B, MLflow and TensorBoard get one curve per run, with its saves and goodput."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, SupportsFloat, final

from msgspec import Struct

from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.stage import PendingScalar, copy_scalar
from holdfast.checkpoint.store import open_store
from holdfast.errors import Corrupt, InvalidInput, Preempted, SaveWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.environment import is_dry_run
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.units import parse_step
from holdfast.watch.report.open_metrics import metric_families
from holdfast.watch.report.summary import read_summary

__all__ = ["Tracker", "attach_mlflow", "attach_tensorboard", "attach_wandb"]

OWN_PREFIX = "holdfast/"
"""Prefix of the numbers of the run itself."""


class RowPlace(Struct, frozen=True):
    """Place of a row in a run."""

    run: str  # id of the run
    attempt: int  # that logs it
    step: int  # as the user counts


class TrackedRun(Protocol):
    """Run of one library. All calls are made by one thread; any may raise any error of the library."""

    def begin(self, place: RowPlace) -> None:
        """Start the run, or continue it. Called before the first row of each attempt."""

    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        """Log a row, without the values of steps that the run has."""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
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
        pairs = values.items()
        numbers = {name: one.read() if isinstance(one, PendingScalar) else one for name, one in pairs}
        self._run.write(place, numbers)

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


NONE = -1
"""Step of a curve without values."""
TAG = "holdfast.run"
"""Tag of a run of MLflow, with the id of Holdfast's run."""
_DIGITS = 20
"""Digits of a step, so that each write replaces all bytes of the one before."""


def _import(module: str, package: str, caller: str, install: str | None = None) -> Any:
    """Return the module of a library that need not be installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(
            f"{caller}() needs {package}: {error}. Run: pip install {install or package}."
        ) from error


def attach_tensorboard(ckpt: Checkpointer, log_dir: str | os.PathLike[str], **writer: Any) -> Tracker:
    """Return a tracker that writes event files for TensorBoard.

    Args:
        ckpt: Checkpointer of the training.
        log_dir: folder of the event files, the same at every start.
        writer: other arguments of torch's `SummaryWriter`, but for `purge_step`.
    """
    make = _import("torch.utils.tensorboard", "tensorboard", "attach_tensorboard").SummaryWriter
    return Tracker(ckpt, _EventFiles(make, os.fspath(log_dir), writer), name="TensorBoard")


class _EventFiles(Struct):
    """Event files of one folder.

    TensorBoard leaves out all events from `purge_step` on that an earlier file has. That step is the first
    that an attempt logs, not the restored one, so it fits however the user counts.
    """

    make: Any
    log_dir: str
    options: Mapping[str, Any]
    writer: Any = None

    def begin(self, place: RowPlace) -> None:
        if self.writer is not None:
            self.writer.close()
        purge_step = place.step if place.attempt > 1 else None
        self.writer = self.make(self.log_dir, purge_step=purge_step, **self.options)

    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, place.step)
        self.writer.flush()  # by default a kill would lose the rows of two minutes

    def end(self, *, has_failed: bool) -> None:
        self.writer.close()


def attach_mlflow(
    ckpt: Checkpointer,
    *,
    experiment: str = "Default",
    tracking_uri: str | None = None,
    run_name: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> Tracker:
    """Return a tracker that logs to one run of MLflow through all restarts.

    Args:
        ckpt: Checkpointer of the training.
        experiment: name of the experiment, which is created if it does not exist.
        tracking_uri: place or server of MLflow; by default that of its environment.
        run_name: name of a new run.
        params: parameters of a new run.
    """
    mlflow = _import("mlflow", "mlflow", "attach_mlflow", "mlflow, or mlflow-skinny")
    return Tracker(ckpt, _MlflowRun(mlflow, experiment, tracking_uri, run_name, params or {}), name="MLflow")


class _MlflowRun(Struct):
    """Run of MLflow, through its client only: a run that the script has active stays as it is."""

    mlflow: Any
    experiment: str
    uri: str | None
    name: str | None  # of a new run
    params: Mapping[str, Any]  # of a new run
    client: Any = None
    id: str = ""
    newest: dict[str, int] = {}  # step of each curve
    first_attempt: int = 0  # of this process

    def begin(self, place: RowPlace) -> None:
        if not self.id:
            self.client = self.mlflow.MlflowClient(self.uri)
            self.id, self.first_attempt = self._find(place.run), place.attempt

    def _find(self, run: str) -> str:
        """Return the id of MLflow's run, which is made at the first start."""
        client = self.client
        experiment = client.get_experiment_by_name(self.experiment)
        is_new = experiment is None
        number = client.create_experiment(self.experiment) if is_new else experiment.experiment_id
        found = client.search_runs([number], filter_string=f"tags.`{TAG}` = '{run}'", max_results=1)
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0].info.run_id
        made = client.create_run(number, tags={TAG: run}, run_name=self.name).info.run_id
        for name, value in self.params.items():
            client.log_param(made, name, value)
        return made

    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        now_ms, metric = int(time.time() * 1000), self.mlflow.entities.Metric
        metrics = [
            metric(curve, value, now_ms, place.step)
            for name, value in values.items()
            if (curve := self._curve_of(name, place)) is not None
        ]
        if metrics:
            self.client.log_batch(self.id, metrics=metrics)

    def _curve_of(self, name: str, place: RowPlace) -> str | None:
        """Return the curve that gets a value; None if the run has it. MLflow cannot replace a value.

        After a restart, training repeats the steps since its checkpoint, so their values are left out. After
        a rollback it trains on other samples: such values get a curve of their own, with the attempt in its
        name.
        """
        curves = [name]
        if place.attempt != self.first_attempt and not name.startswith(OWN_PREFIX):
            curves.append(f"{name}-attempt-{place.attempt}")
        for curve in curves:
            if curve not in self.newest:
                history = self.client.get_metric_history(self.id, curve)
                self.newest[curve] = max((one.step for one in history), default=NONE)
            if place.step > self.newest[curve]:
                self.newest[curve] = place.step
                return curve
        return None

    def end(self, *, has_failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if has_failed else "FINISHED")


@final
class StepRecord:
    """Newest step of a run in a file. A step is recorded before its row is logged.

    The file survives the end of the process, not a power loss: it is not flushed for each row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # the training may change the current folder
        with self._open() as file:
            found = file.read(_DIGITS + 2)
        if found and not (len(found) == _DIGITS + 1 and found[:-1].isdigit() and found.endswith(b"\n")):
            raise Corrupt(
                f"{path} should have one step of {_DIGITS} digits, and has {found!r}. Nothing was logged. "
                "Without the file, the steps since the last checkpoint are logged again: delete it to accept "
                "that."
            )
        self.step = int(found) if found else NONE

    def raise_to(self, step: int) -> None:
        """Record a newer step."""
        with self._open() as file:
            file.write(b"%0*d\n" % (_DIGITS, step))  # one system call, which a kill does not divide
        self.step = step

    def _open(self) -> FileIO:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return FileIO(os.open(self._path, flags, 0o644), "r+")


def attach_wandb(
    ckpt: Checkpointer, folder: str | os.PathLike[str], *, project: str | None = None, **init: Any
) -> Tracker:
    """Return a tracker that logs to one run of Weights & Biases through all restarts.

    Args:
        ckpt: Checkpointer of the training.
        folder: W&B's files and the record of the newest step, the same at every start.
        project: project of the run; by default that of W&B's environment.
        init: other arguments of `wandb.init`, but for `id`, `resume`, `dir` and `reinit`.
    """
    wandb = _import("wandb", "wandb", "attach_wandb")
    return Tracker(ckpt, _WandbRun(wandb, Path(folder), {"project": project, **init}), name="W&B")


class _WandbRun(Struct):
    """Run of W&B. A run that the script has active stays as it is.

    W&B ignores rows that are not newer than its last one, and its offline mode does not know what an earlier
    start has logged. So a row is logged once the next step begins, with all values of its step, after the
    record has its step. A kill in between loses the row; no row is logged twice.

    Source: documentation of `wandb.init` (`resume`, `reinit`) and `Run.log` (`step`, `commit`), wandb 0.31.
    """

    wandb: Any
    folder: Path
    options: Mapping[str, Any]
    run: Any = None
    record: StepRecord | None = None
    step: int = NONE  # of the row that is not logged yet
    values: dict[str, float] = {}

    def begin(self, place: RowPlace) -> None:
        if self.run is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record = StepRecord(self.folder / f"holdfast-{place.run}.step")
            self.run = self.wandb.init(
                id=place.run, resume="allow", dir=str(self.folder), reinit="create_new", **self.options
            )
        self._log_row()  # the next attempt may do the same step again

    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        assert self.record is not None
        if place.step > self.step:
            self._log_row()
        if place.step <= max(self.record.step, self.run.starting_step - 1):
            return  # done again
        self.step = place.step
        self.values.update(values)

    def _log_row(self) -> None:
        if not self.values:
            return
        assert self.record is not None
        values, self.values = self.values, {}
        self.record.raise_to(self.step)
        self.run.log(values, step=self.step, commit=True)

    def end(self, *, has_failed: bool) -> None:
        self._log_row()
        self.run.finish(exit_code=int(has_failed))
