"""Lightning's `AsyncCheckpointIO`: a clone on the caller, `TorchCheckpointIO` in a thread."""

from __future__ import annotations

from .contract import Peer, Pending


class Lightning(Peer):
    """The plugin that Trainer and Fabric save with, without a Trainer around it."""

    title = "Lightning AsyncCheckpointIO"
    module = package = "lightning"
    syncs = False
    overlaps = True

    def open(self) -> None:
        """Make the plugin."""
        from lightning.fabric.plugins import TorchCheckpointIO  # pyright: ignore[reportMissingImports] - in peers/requirements.txt
        from lightning.pytorch.plugins.io import AsyncCheckpointIO  # pyright: ignore[reportMissingImports] - as above

        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, step: int) -> Pending:
        """Clone on the caller, write in a thread."""
        self._io.save_checkpoint(self.state_dicts(), str(self.path(step)))
        return Pending(wait_complete=self._wait)

    def load(self, step: int) -> None:
        """Load through the plugin."""
        self.set_state_dicts(self._io.load_checkpoint(str(self.path(step)), weights_only=True))

    def close(self) -> None:
        """Stop the thread."""
        self._io.teardown()

    def _wait(self) -> None:
        """Wait by an empty task behind the save: the plugin keeps no future, and has one thread."""
        executor = self._io._executor
        if executor is not None:
            executor.submit(lambda: None).result()
        if self._io._error is not None:
            raise self._io._error
