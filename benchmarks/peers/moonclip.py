"""`moonclip`: deltas of tensors, compressed and written by threads in Rust."""

from __future__ import annotations

from typing import ClassVar

from .contract import Peer, Pending


class Moonclip(Peer):
    """`CheckpointManager` with its defaults: every bit is kept, and deltas follow a whole snapshot."""

    title = "moonclip"
    module = package = "moonclip"
    syncs = True
    overlaps = True
    save_dtype: ClassVar[str | None] = None

    def open(self) -> None:
        """Make the manager; its own retention keeps the disk small."""
        from moonclip import CheckpointManager  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue] - in peers/requirements.txt

        self._manager = CheckpointManager(
            str(self.directory / "store"), save_dtype=self.save_dtype, max_total_snapshots=3
        )

    def save(self, step: int) -> Pending:
        """Copy on the caller; compress and write in threads."""
        self._manager.save(step=step, model=self.subject.model, optimizer=self.subject.optimizer)
        return Pending(wait_complete=self._manager.flush)

    def load(self, step: int) -> None:
        """Load the newest snapshot, every tensor verified."""
        following = self._manager.resume(model=self.subject.model, optimizer=self.subject.optimizer)
        if following != step + 1:
            raise RuntimeError(f"resumes at step {following}, expected {step + 1}")

    def delete(self, step: int) -> None:
        """Leave it to the retention: later deltas need an older snapshot."""

    def close(self) -> None:
        """Wait for the threads."""
        self._manager.flush()
        del self._manager


class MoonclipBf16(Moonclip):
    """The configuration of its README, behind its published figures: float tensors become bfloat16."""

    title = "moonclip, save_dtype bf16"
    save_dtype = "bf16"
