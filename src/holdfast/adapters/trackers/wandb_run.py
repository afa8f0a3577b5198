"""Run of Weights & Biases: continued under one id, with a record of the newest step that it has."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from holdfast.adapters.trackers.tracker import NONE, RowPlace, TrackedRun, Tracker
from holdfast.checkpoint.run import Checkpointer
from holdfast.errors import Corrupt, Unsupported

_DIGITS = 20
"""Digits of a step, so that each write replaces all bytes of the one before."""


@final
class StepRecord:
    """Newest step of a run in a file. A step is recorded before its row is logged.

    The file survives the end of the process, not a power loss: it is not flushed for each row.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        found = os.pread(self._fd, _DIGITS + 2, 0)
        if found and not (len(found) == _DIGITS + 1 and found[:-1].isdigit() and found.endswith(b"\n")):
            raise Corrupt(
                f"{path} should have one step of {_DIGITS} digits, and has {found!r}. Nothing was logged. "
                "Without the file, the steps since the last checkpoint are logged again: delete it to accept "
                "that."
            )
        self.step = int(found) if found else NONE

    def raise_to(self, step: int) -> None:
        """Record a newer step."""
        os.pwrite(self._fd, b"%0*d\n" % (_DIGITS, step), 0)
        self.step = step

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


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
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise Unsupported(f"attach_wandb() needs wandb: {error}. Run: pip install wandb.") from error
    return Tracker(ckpt, _WandbRun(wandb, Path(folder), {"project": project, **init}), name="W&B")


@final
class _WandbRun(TrackedRun):
    """Run of W&B. A run that the script has active stays as it is.

    W&B ignores rows that are not newer than its last one, and its offline mode does not know what an earlier
    start has logged. So a row is logged once the next step begins, with all values of its step, after the
    record has its step. A kill in between loses the row; no row is logged twice.

    Source: documentation of `wandb.init` (`resume`, `reinit`) and `Run.log` (`step`, `commit`), wandb 0.31.
    """

    def __init__(self, wandb: Any, folder: Path, init: Mapping[str, Any]) -> None:
        self._wandb, self._folder, self._init = wandb, folder, init
        self._run: Any = None
        self._record: StepRecord | None = None
        self._step = NONE  # of the row that is not logged yet
        self._values: dict[str, float] = {}

    @override
    def begin(self, place: RowPlace) -> None:
        if self._run is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._record = StepRecord(self._folder / f"holdfast-{place.run}.step")
            self._run = self._wandb.init(
                id=place.run, resume="allow", dir=str(self._folder), reinit="create_new", **self._init
            )
        self._log_row()  # the next attempt may do the same step again

    @override
    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        if place.step > self._step:
            self._log_row()
        if place.step <= self._newest():
            return  # done again
        self._step = place.step
        self._values.update(values)

    def _newest(self) -> int:
        assert self._record is not None
        return max(self._record.step, self._run.starting_step - 1)

    def _log_row(self) -> None:
        if not self._values:
            return
        assert self._record is not None
        values, self._values = self._values, {}
        self._record.raise_to(self._step)
        self._run.log(values, step=self._step, commit=True)

    @override
    def end(self, *, has_failed: bool) -> None:
        self._log_row()
        self._run.finish(exit_code=int(has_failed))
