"""Interface of a way of saving and resuming, as the replayed training sees it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from holdfast.system.environment import JobReport, report_to_job

HANG_S = 5.0
"""Limit of a step. A rank that hangs ends its attempt after that time, with every tool."""
PREEMPTED_STATUS = 75
KEPT = 2
"""Checkpoints that are kept."""


@dataclass(frozen=True)
class Training:
    """The training's objects."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path  # all nodes see it
    every: int  # steps from save to save

    @property
    def home(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "home"

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return dist.get_rank()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Tool(ABC):
    """One way of saving and resuming."""

    title: ClassVar[str]
    module: ClassVar[str] = "torch"
    """Module that must be installed."""

    def __init__(self, training: Training) -> None:
        self.training = training

    @abstractmethod
    def run(self, total: int, body: Callable[[int], None]) -> None:
        """Resume, and call `body` with each step that is left."""


class Loop(Tool):
    """A tool whose loop is a generator of steps."""

    def run(self, total: int, body: Callable[[int], None]) -> None:
        """Call `body` with each step that is left."""
        for step in self.steps(total):
            body(step)

    @abstractmethod
    def steps(self, total: int) -> Iterator[int]:
        """Resume, and yield the steps that are left."""


class HandWritten(Loop):
    """Loop of a careful script: notices, renamed saves, and the newest checkpoint that loads."""

    def steps(self, total: int) -> Iterator[int]:
        """Yield steps; save every few steps and after SIGTERM, then exit with 75."""
        stop = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
        self.training.home.mkdir(exist_ok=True)
        step = self.resume()
        while step < total:
            yield step
            step += 1
            is_last = stop.clone()
            dist.all_reduce(is_last, op=dist.ReduceOp.MAX)  # all ranks save the same step
            limit_ops()
            self.look()
            if is_last or step % self.training.every == 0:
                try:
                    self.save(step)
                except OSError as error:  # a full disk; the next save may succeed
                    print(f"cannot save step {step}: {error}", flush=True)
            if is_last:
                self.finish()
                os._exit(PREEMPTED_STATUS)

    @abstractmethod
    def save(self, step: int) -> None:
        """Save a step."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Load one checkpoint."""

    def look(self) -> None:
        """Complete a save that ran in the background."""

    def finish(self) -> None:
        """Wait for a save that runs in the background."""

    def resume(self) -> int:
        """Load the newest checkpoint that loads on all ranks, and return its step."""
        for path in sorted(self.training.home.glob("step-*"), key=_step, reverse=True):
            failed = torch.zeros(1)
            try:
                self.load(path)
            except Exception as error:  # noqa: BLE001 - whatever a damaged file causes
                print(f"cannot load {path.name}: {type(error).__name__}: {error}", flush=True)
                failed += 1
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
            if not failed:
                return _step(path)
        return 0

    def publish(self, written: Path, step: int) -> None:
        """Give a written checkpoint its name, durably, and remove older ones."""
        home = self.training.home
        remove(home / f"step-{step}")  # a damaged one, which resuming has passed over
        written.rename(home / f"step-{step}")
        folder = os.open(home, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        for old in sorted(home.glob("step-*"), key=_step)[:-KEPT]:
            remove(old)
        report_to_job(JobReport(home="by hand", step=step))


def remove(path: Path) -> None:
    """Remove a file or folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def limit_ops() -> None:
    """Let collectives fail once a rank has hung. The first one, before this call, has torch's limit."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_S), dist.group.WORLD)


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
