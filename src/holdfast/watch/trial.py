"""Watch of a trial, for `holdfast check` and `replay`: saves, ends or is killed at the steps of a plan."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from holdfast.checkpoint.policy import Every, Moment
from holdfast.checkpoint.watch import RestoredState, Watch, WatchedRun
from holdfast.errors import HoldfastError, ResumeWarning
from holdfast.system.documents import decode_as
from holdfast.system.environment import TRIAL

if TYPE_CHECKING:
    from holdfast.checkpoint.state.review import ResumeRisk

_MAX_DEPTH = 6  # of containers in a batch


@dataclass(frozen=True, slots=True)
class TrialPlan(Every):
    """Plan of a trial, and its policy of saves: the steps that it saves, ends or is killed after."""

    folder: str  # for traces
    save_at: tuple[int, ...]
    end_at: int | None  # ends after the save of this step or a later one
    kill_at: int | None = None  # sends itself SIGKILL when this step is complete, and a save is durable
    num_saves: int = 1  # how many saves a trial that is to end makes at least
    timed = False

    @override
    def due(self, moment: Moment) -> bool:
        return moment.step > moment.saved_step and moment.step in self.save_at


class Trial(Watch):
    """Observer of one process of a trial. Writes a trace: generators and batches by step, saves, doubts."""

    name: ClassVar[str] = "trial"

    def __init__(self) -> None:
        text = Path(os.environ[TRIAL]).read_text()
        self._plan = decode_as(TrialPlan, text, "the plan of a trial")

    @property
    @override
    def every(self) -> Every:
        return self._plan

    @override
    def begin(self, run: WatchedRun) -> None:
        self._run, self._num_saves, self._step, self._saved = run, 0, 0, 0
        name = f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
        self._trace = (Path(self._plan.folder) / name).open("a", buffering=1)
        _watch_batches(lambda digest: self._note("batch", digest, self._step))
        # The command shows the doubts.
        warnings.filterwarnings("ignore", "The run will not resume|Training may go back", ResumeWarning)

    def _note(self, kind: str, value: Any, step: int = -1) -> None:
        self._trace.write(json.dumps([step, kind, value]) + "\n")

    @override
    def restored(self, state: RestoredState) -> None:
        if state.step is not None:
            self._step = state.step
            self._note("restored", state.step)

    @override
    def step(self, step: int) -> None:
        self._end_if_due()
        self._step = step
        self._note("generators", _generators(), step)
        self._kill_if_due(step)

    @override
    def save_began(self, step: int) -> None:
        # A script that has no loop of ours ends or is killed here.
        self._end_if_due()
        self._step = max(self._step, step)
        self._kill_if_due(step)
        self._num_saves, self._saved = self._num_saves + 1, step
        self._note("saved", step, step)

    @override
    def reviewed(self, risks: Sequence[ResumeRisk]) -> None:
        self._note("doubts", [{"text": one.text, "would_show": one.would_show} for one in risks])

    def _end_if_due(self) -> None:
        plan = self._plan
        if plan.end_at is not None and self._saved >= plan.end_at and self._num_saves >= plan.num_saves:
            self._do(self._run.leave)

    def _do(self, act: Callable[[], object]) -> None:
        """Wait for the saves. An error of theirs ends the script; raised here it would end the trial only."""
        try:
            act()
        except HoldfastError as error:
            raise SystemExit(str(error)) from error

    def _kill_if_due(self, step: int) -> None:
        if self._plan.kill_at is not None and step >= self._plan.kill_at and self._num_saves:
            self._do(self._run.wait)
            self._note("killed", step)
            self._trace.close()
            os.kill(os.getpid(), signal.SIGKILL)


def _generators() -> dict[str, str]:
    """Return digests of the states of the process-wide generators."""
    import torch

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
    import torch

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
