"""NVIDIA's `nvidia-resiliency-ext`: `torch.save` in another process, forked or kept.

It is made for CUDA: where PyTorch has none, `torch.cuda.synchronize` is replaced by one without effect.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from . import onerank
from .contract import Peer, Pending


class NvrxFork(Peer):
    """`TorchAsyncCheckpoint` with a forked child, whose copy on write is the snapshot."""

    title = "NVRx TorchAsyncCheckpoint, fork; torch.cuda.synchronize replaced"
    module = "nvidia_resiliency_ext"
    package = "nvidia-resiliency-ext"
    syncs = False
    overlaps = True
    loads_with = "torch.load"
    is_persistent: ClassVar[bool] = False

    def open(self) -> None:
        """Make the group that it asks for, and its queue."""
        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import (  # pyright: ignore[reportMissingImports] - in peers/requirements.txt
            TorchAsyncCheckpoint,
        )

        onerank.join()
        self._checkpoint = TorchAsyncCheckpoint(persistent_queue=self.is_persistent)

    def save(self, step: int) -> Pending:
        """Give the live tensors to the child."""
        self._checkpoint.async_save(self.state_dicts(), str(self.path(step)))
        return Pending(wait_complete=self._finalize)

    def load(self, step: int) -> None:
        """Load with `torch.load`: the files are those of `torch.save`."""
        self.set_state_dicts(torch.load(self.path(step), weights_only=True))

    def close(self) -> None:
        """End the child."""
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)
        caller = self._checkpoint._async_calls_queue.persistent_caller
        if caller is not None:
            caller.close()

    def _finalize(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)


class NvrxPersistent(NvrxFork):
    """The same with a spawned child that is kept, and reads tensors of host memory where they are.

    CUDA tensors, for which it is made, are copied to the host before.
    """

    title = "NVRx TorchAsyncCheckpoint, persistent worker; torch.cuda.synchronize replaced"
    is_persistent = True
