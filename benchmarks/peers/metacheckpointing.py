"""`torch_checkpointing`, Meta's successor of DCP: synchronous and asynchronous.

Its default, O_DIRECT, fails with EINVAL on ext4 when the last write is no whole block (seen with 0.1.1), so
direct I/O is switched off here, as its documentation allows.
"""

from __future__ import annotations

import contextlib
from typing import Any

from .contract import Peer, Pending


class TorchCheckpointing(Peer):
    """`CheckpointManager` with its synchronous saver."""

    title = "torch_checkpointing, sync"
    module = "torch_checkpointing"
    syncs = False
    overlaps = False

    def open(self) -> None:
        """Make the manager."""
        from torch_checkpointing import CheckpointManager  # pyright: ignore[reportMissingImports] - in the bench extra

        config = CheckpointManager.Config.with_sync_save()
        config.storage_config = _buffered()
        self._manager = config.build()

    def save(self, step: int) -> Pending:
        """Save both state dicts."""
        self._manager.save(str(self.path(step)), self._state())
        return Pending()

    def load(self, step: int) -> None:
        """Load in place."""
        found = self._manager.load(str(self.path(step)), into=self._state(), strict=True)
        self.subject.model.load_state_dict(found["model"])
        if self.subject.optimizer is not None:
            self.subject.optimizer.load_state_dict(found["optimizer"])

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.subject.model.state_dict()}
        if self.subject.optimizer is not None:
            state["optimizer"] = self.subject.optimizer.state_dict()
        return state


class TorchCheckpointingAsync(TorchCheckpointing):
    """`CheckpointManager` with its asynchronous saver: copied by a thread, written by a child."""

    title = "torch_checkpointing, async"
    overlaps = True
    own_load = False

    def open(self) -> None:
        """Make the manager, which starts its child."""
        from torch_checkpointing import CheckpointManager  # pyright: ignore[reportMissingImports] - in the bench extra

        config = CheckpointManager.Config.with_async_save()
        config.storage_config = _buffered()
        self._manager = config.build()

    def prepare(self) -> None:
        """Allocate the staging memory."""
        self._manager.prewarm_staging(self._state())

    def save(self, step: int) -> Pending:
        """Copy in a thread, write in the child."""
        future = self._manager.save(str(self.path(step)), self._state())
        if future is None:
            message = "the asynchronous saver answered as a synchronous one"
            raise RuntimeError(message)
        return Pending(self._wait_staged, future.result)

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """The manager's own lock, as its documentation advises."""
        return self._manager.lock()

    def _wait_staged(self) -> None:
        with self._manager.lock():
            pass


def _buffered() -> Any:
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # pyright: ignore[reportMissingImports] - in the bench extra

    return LocalFileSystemStorageConfig(use_direct_io=False)
