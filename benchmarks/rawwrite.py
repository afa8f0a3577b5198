"""Raw writes of as many bytes beside a training: what the disk alone costs it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import limits
from peers.contract import Peer, Pending
from states import Subject


class RawWrite(Peer):
    """Raw writes of as many bytes as the state has, each to a new file, without copies or hashes."""

    title = "raw write of as many bytes"
    module = "os"
    syncs = True
    overlaps = True

    def __init__(self, subject: Subject, directory: Path) -> None:
        super().__init__(subject, directory)
        self._pool = ThreadPoolExecutor(1, "raw-write")

    def open(self) -> None:
        """Find the number of writes at once that is the fastest here."""
        self._direct = limits.takes_direct(self.directory)
        self._depth = limits.best_write_depth(self.subject.num_bytes, self.directory)

    def save(self, step: int) -> Pending:
        """Start a write."""
        write = self._pool.submit(
            limits.write_raw, self.path(step), self.subject.num_bytes, self._depth, direct=self._direct
        )
        return Pending(wait_complete=write.result)

    def load(self, step: int) -> None:
        """Raise: there is nothing to load."""
        raise NotImplementedError(f"{os.fspath(self.path(step))} is not a checkpoint")

    def close(self) -> None:
        """End the thread that writes."""
        self._pool.shutdown()
