"""Trial: run of a script by `holdfast check` or `replay` that saves, ends or is killed at given steps."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.system.documents import decode_dataclass
from holdfast.system.environment import TRIAL

_MAX_DEPTH = 6  # of containers in a batch


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Plan of a trial: the steps that it saves, ends or is killed after."""

    folder: str  # for traces
    save_at: tuple[int, ...]
    end_at: int | None  # ends after the save of this step or a later one
    kill_at: int | None = None  # sends itself SIGKILL when this step is complete, and a save is durable
    num_saves: int = 1  # how many saves a trial that is to end makes at least


class Trial:
    """Observer of one process of a trial. Writes a trace: generators, batches and records by step.

    Args:
        plan: steps at which the trial acts.
    """

    def __init__(self, plan: TrialPlan) -> None:
        self._plan = plan
        self._num_saves, self._step = 0, 0
        name = f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
        self._trace = (Path(plan.folder) / name).open("a", buffering=1)
        _watch_batches(lambda digest: self.note("batch", digest, self._step))

    @classmethod
    def of_environment(cls) -> Trial | None:
        """Return the trial that this process is part of; None outside of one."""
        path = os.environ.get(TRIAL)
        if not path:
            return None
        return cls(decode_dataclass(TrialPlan, Path(path).read_text(), "the plan of a trial"))

    def note(self, kind: str, value: Any, step: int = -1) -> None:
        """Write a line to the trace."""
        self._trace.write(json.dumps([step, kind, value]) + "\n")
        if kind == "restored":
            self._step = value

    def reach(self, step: int, *, is_due: bool, wait: Callable[[], object]) -> bool:
        """Record that a step is complete; return True if it must be saved now.

        Args:
            is_due: the script's own policy saves it.
            wait: function that waits until every save is durable.
        """
        self._step = step
        self.note("generators", _generators(), step)
        self._kill_if_due(step, wait)
        return is_due or step in self._plan.save_at

    def begin_save(self, step: int, *, wait: Callable[[], object]) -> None:
        """Count a save. A script that never calls `should_save` is killed here, at its second save."""
        self._step = max(self._step, step)
        self._kill_if_due(step, wait)
        self._num_saves += 1
        self.note("saved", step, step)

    def is_last(self, step: int) -> bool:
        """Return True if the trial ends with the save of `step`."""
        plan = self._plan
        return plan.end_at is not None and step >= plan.end_at and self._num_saves >= plan.num_saves

    def _kill_if_due(self, step: int, wait: Callable[[], object]) -> None:
        if self._plan.kill_at is not None and step >= self._plan.kill_at and self._num_saves:
            wait()
            self.note("killed", step)
            self._trace.close()
            os.kill(os.getpid(), signal.SIGKILL)


def _generators() -> dict[str, str]:
    """Return digests of the states of the process-wide generators."""
    states: dict[str, bytes] = {
        "python": repr(random.getstate()).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = repr(numpy.random.get_state(legacy=False)).encode()
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}


def _watch_batches(record: Callable[[str], None]) -> None:
    """Record the digest of every batch that a data loader of this process returns."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    kind: Any = _BaseDataLoaderIter
    before = kind.__next__

    def watched(self: Any) -> Any:
        batch = before(self)
        digest = hashlib.sha256()
        _feed(digest, batch, _MAX_DEPTH)
        record(digest.hexdigest()[:16])
        return batch

    kind.__next__ = watched


def _feed(digest: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel() and tensor.layout == torch.strided:
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif depth and isinstance(value, dict):
        for name, item in value.items():
            digest.update(repr(name).encode())
            _feed(digest, item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            _feed(digest, item, depth - 1)
    elif isinstance(value, (int, float, str, bytes, bool, type(None))):
        digest.update(repr(value).encode())
