"""`lm-resiliency`: GEMINI's copies in memory, with the flush to the local disk.

Copies in other ranks' memory are what GEMINI is about, and one rank has no other. So a save here is a copy
into its own buffers, which a failure of the process loses, and a flush that makes it durable.
"""

from __future__ import annotations

from pathlib import Path

from .contract import Peer, Pending


class LmResiliency(Peer):
    """`InMemoryCheckpointManager` on one rank; each save is flushed, with its checksum."""

    title = "lm-resiliency GEMINI, one rank, flushed to disk"
    module = "lm_resiliency"
    package = "lm-resiliency"
    syncs = True
    overlaps = True

    def open(self) -> None:
        """Make the manager; nothing is pinned, since the state is in host memory."""
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig  # pyright: ignore[reportMissingImports] - in peers/requirements.txt

        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(
                pin_memory=False,
                disk_flush_interval=0,
                disk_folder=str(self.directory / "tier"),
                run_id="benchmark",
                verify_integrity=True,
            )
        )

    def save(self, step: int) -> Pending:
        """Copy, and start the flush once the copy is complete."""
        self._manager.save(self.state_dicts(), step)
        return Pending(self._manager.maybe_wait, lambda: self._flush(step))

    def load(self, step: int) -> None:
        """Load from the disk: the memory of this manager has nothing."""
        found = self._manager.load(step=step)
        if found is None:
            raise RuntimeError(f"nothing to load at step {step}")
        self.set_state_dicts(found[0])

    def delete(self, step: int) -> None:
        """Remove the files of a step, which the manager would keep."""
        for path in self._files_of(step):
            path.unlink()

    def settle(self) -> None:
        """Nothing is on its way once a flush is complete."""

    def close(self) -> None:
        """Release the buffers."""
        self._manager.close()

    def _flush(self, step: int) -> None:
        self._manager.maybe_wait()
        self._manager.flush_to_disk(step)
        self._manager._disk.wait()
        if not self._files_of(step):
            raise RuntimeError(f"step {step} was not flushed")

    def _files_of(self, step: int) -> list[Path]:
        return list((self.directory / "tier").rglob(f"step-{step}/rank-*.pt"))
