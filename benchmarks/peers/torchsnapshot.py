"""`torchsnapshot`, the predecessor of `torch.distributed.checkpoint`: `Snapshot.async_take`."""

from __future__ import annotations

from typing import Any

from . import onerank
from .contract import Peer, Pending


class TorchSnapshot(Peer):
    """`Snapshot.async_take` of the model and the optimizer, in a group of one rank."""

    title = "torchsnapshot async_take"
    module = package = "torchsnapshot"
    syncs = False
    overlaps = True

    def open(self) -> None:
        """Make the group that its commit asks for."""
        onerank.join()

    def save(self, step: int) -> Pending:
        """Copy on the caller, write in a thread."""
        from torchsnapshot import Snapshot  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue] - in peers/requirements.txt

        return Pending(wait_complete=Snapshot.async_take(str(self.path(step)), self._app_state()).wait)

    def load(self, step: int) -> None:
        """Restore in place."""
        from torchsnapshot import Snapshot  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue] - in peers/requirements.txt

        Snapshot(str(self.path(step))).restore(self._app_state())

    def close(self) -> None:
        """Nothing to stop."""

    def _app_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.subject.model}
        if self.subject.optimizer is not None:
            state["optimizer"] = self.subject.optimizer
        return state
