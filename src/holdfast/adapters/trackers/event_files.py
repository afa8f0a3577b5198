"""Event files of TensorBoard: each attempt writes a new one, which replaces what it does again."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, final

from typing_extensions import override

from holdfast.adapters.trackers.tracker import RowPlace, TrackedRun, Tracker
from holdfast.checkpoint.run import Checkpointer
from holdfast.errors import Unsupported


def attach_tensorboard(ckpt: Checkpointer, log_dir: str | os.PathLike[str], **writer: Any) -> Tracker:
    """Return a tracker that writes event files for TensorBoard.

    Args:
        ckpt: Checkpointer of the training.
        log_dir: folder of the event files, the same at every start.
        writer: other arguments of torch's `SummaryWriter`, but for `purge_step`.
    """
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise Unsupported(
            f"attach_tensorboard() needs tensorboard: {error}. Run: pip install tensorboard."
        ) from error
    make = module.SummaryWriter
    return Tracker(ckpt, _EventFiles(make, os.fspath(log_dir), writer), name="TensorBoard")


@final
class _EventFiles(TrackedRun):
    """Event files of one folder.

    TensorBoard leaves out all events from `purge_step` on that an earlier file has. That step is the first
    that an attempt logs, not the restored one, so it fits however the user counts.
    """

    def __init__(self, make: Any, log_dir: str, options: Mapping[str, Any]) -> None:
        self._make, self._log_dir, self._options = make, log_dir, options
        self._writer: Any = None

    @override
    def begin(self, place: RowPlace) -> None:
        if self._writer is not None:
            self._writer.close()
        purge_step = place.step if place.attempt > 1 else None
        self._writer = self._make(self._log_dir, purge_step=purge_step, **self._options)

    @override
    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, place.step)
        self._writer.flush()  # by default a kill would lose the rows of two minutes

    @override
    def end(self, *, has_failed: bool) -> None:
        self._writer.close()
