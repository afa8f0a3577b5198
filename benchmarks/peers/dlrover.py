"""DLRover's Flash Checkpoint: shared memory, which another process writes to disk.

Without `dlrover-run`, the engine starts that process itself. It ends with the trainer.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

from .contract import Peer, Pending

PERIOD_S, LIMIT_S = 0.01, 300.0


class DlRover(Peer):
    """`DdpCheckpointer` with `StorageType.DISK` on one rank, without `dlrover-run`."""

    title = "DLRover DdpCheckpointer, DISK"
    module = package = "dlrover"
    syncs = False
    overlaps = True

    def open(self) -> None:
        """Start the process that writes; its sockets and memory have a name of their own."""
        os.environ["TORCHELASTIC_RUN_ID"] = f"benchmark-{uuid.uuid4().hex[:12]}"
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # pyright: ignore[reportMissingImports] - in peers/requirements.txt

        self._checkpointer: Any = DdpCheckpointer(str(self.directory / "store"))

    def save(self, step: int) -> Pending:
        """Copy into shared memory on the caller; the process writes it.

        Raises:
            RuntimeError: the engine skipped the save, which it does without a word while it writes another.
        """
        self._checkpointer.save_checkpoint(step, self.state_dicts(), path=str(self.path(step) / "rank_0.pt"))
        if self._checkpointer._engine._cached_step != step:
            raise RuntimeError(f"DLRover skipped the save of step {step}")
        return Pending(wait_complete=lambda: self._wait(step))

    def load(self, step: int) -> None:
        """Load from disk: the shared memory of this run is empty."""
        found = self._checkpointer.load_checkpoint(str(self.path(step) / "rank_0.pt"))
        if not found:
            raise RuntimeError(f"nothing to load at step {step}")
        self.set_state_dicts(found)

    def close(self) -> None:
        """End the process, and free the shared memory."""
        engine = self._checkpointer._engine
        engine._shm_handler.close()
        engine._shm_handler.unlink()
        engine.saver_proc.terminate()
        engine.saver_proc.join()

    def _wait(self, step: int) -> None:
        """Wait for the tracker file; the engine's own wait looks every 3 seconds."""
        tracker = self.directory / "store" / "dlrover_latest.txt"
        until_s = time.monotonic() + LIMIT_S
        while not tracker.exists() or tracker.read_text() != str(step):
            if time.monotonic() > until_s:
                raise TimeoutError(f"step {step} was not written within {LIMIT_S:.0f} s")
            time.sleep(PERIOD_S)
