"""`torch.distributed.checkpoint`: save, and async_save with a thread or a process."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from .contract import Peer, Pending


class Dcp(Peer):
    """`dcp.save`; the other variants share its state dicts and its load."""

    title = "DCP save"
    module = "torch"
    syncs = True
    overlaps = False

    def open(self) -> None:
        """Nothing to start."""

    def save(self, step: int) -> Pending:
        """Save synchronously."""
        save(self._state(), checkpoint_id=self.path(step), no_dist=True)
        return Pending()

    def load(self, step: int) -> None:
        """Load in place and set both state dicts."""
        state = self._state()
        load(state, checkpoint_id=self.path(step), no_dist=True)
        model, optimizer = self.subject.model, self.subject.optimizer
        if optimizer is None:
            set_model_state_dict(model, state["model"])
        else:
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )

    def close(self) -> None:
        """Nothing to stop."""

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.subject.model, self.subject.optimizer
        if optimizer is None:
            return {"model": get_model_state_dict(model)}
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}


class DcpThread(Dcp):
    """`dcp.async_save` as it comes: copied on the caller, written by a thread."""

    title = "DCP async_save, thread"
    overlaps = True
    own_load = False

    def save(self, step: int) -> Pending:
        """Copy, then write in a thread."""
        answer = async_save(self._state(), checkpoint_id=self.path(step), no_dist=True)
        return _pending(answer)


class DcpStaged(Dcp):
    """`dcp.async_save` with one stager kept from save to save, which copies in a thread."""

    title = "DCP async_save, thread, reused async stager"
    overlaps = True
    own_load = False

    def open(self) -> None:
        """Make the stager; without an accelerator it can neither pin nor copy without blocking."""
        pin = torch.accelerator.is_available()
        self._stager = DefaultStager(StagingOptions(pin, False, True, pin))
        self._staged: Future[None] | None = None

    def save(self, step: int) -> Pending:
        """Copy and write in threads."""
        answer = async_save(
            self._state(), checkpoint_id=self.path(step), no_dist=True, async_stager=self._stager
        )
        self._staged = answer.staging_completion if isinstance(answer, AsyncSaveResponse) else None
        return _pending(answer)

    def guard(self) -> _Wait:
        """Wait until the copy is complete."""
        return _Wait(self._staged)

    def close(self) -> None:
        """Close the stager."""
        self._stager.close()


class DcpProcess(Dcp):
    """`dcp.async_save` with a process: copied on the caller into shared memory, written by a child."""

    title = "DCP async_save, process"
    overlaps = True
    own_load = False

    def open(self) -> None:
        """Make the one-rank group that the child needs."""
        if not dist.is_initialized():
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
            meeting = self.directory / "group"
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)

    def save(self, step: int) -> Pending:
        """Copy, then let the child write."""
        answer = async_save(
            self._state(),
            checkpoint_id=self.path(step),
            no_dist=True,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        return _pending(answer)


class _Wait:
    """A context that waits for a future before it is entered."""

    def __init__(self, future: Future[None] | None) -> None:
        self._future = future

    def __enter__(self) -> None:
        if self._future is not None:
            self._future.result()

    def __exit__(self, *_: object) -> None:
        return None


def _pending(answer: Future[Any] | AsyncSaveResponse) -> Pending:
    if isinstance(answer, AsyncSaveResponse):
        return Pending(answer.staging_completion.result, answer.upload_completion.result)
    return Pending(wait_complete=answer.result)
