"""`torch.distributed.checkpoint.async_save` every few steps, into a folder that is renamed when complete."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from .contract import HandWritten, Training, remove


class DcpAsync(HandWritten):
    """All ranks save together, in a thread; one save at a time."""

    title = "DCP async_save"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._pending: tuple[int, Path, Future[Any]] | None = None
        self._group: Any = dist.new_group(backend="gloo")  # its collectives run beside those of training

    def save(self, step: int) -> None:
        """Begin a save, once the last one is complete."""
        self.finish()
        path = self.training.home / f"writing-{step}"
        if self.training.rank == 0:
            remove(path)
        dist.barrier()
        future: Any = async_save(self._state(), checkpoint_id=str(path), process_group=self._group)
        self._pending = (step, path, future)

    def look(self) -> None:
        """Rename the folder of a complete save."""
        if self._pending is not None and self._pending[2].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save, and rename its folder."""
        if self._pending is None:
            return
        step, path, future = self._pending
        self._pending = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the next one may succeed
            print(f"step {step} was not saved: {type(error).__name__}: {error}", flush=True)
            return
        if self.training.rank == 0:
            self.publish(path, step)

    def load(self, path: Path) -> None:
        """Load in place.

        Raises:
            ValueError: a file is damaged.
        """
        state = self._state()
        try:
            load(state, checkpoint_id=str(path))
        except CheckpointException as error:  # which is no Exception
            raise ValueError(str(error)) from error
        set_state_dict(
            self.training.model,
            self.training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}
