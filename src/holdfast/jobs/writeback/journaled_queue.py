"""The upload queue and its journal, which change together under one lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import RetryLater
from holdfast.jobs.writeback.journal import Journal
from holdfast.jobs.writeback.upload_queue import Upload, UploadQueue, Writes
from holdfast.system.log import get_logger

_log = get_logger("jobs.writeback")

_PAUSE_S = 1.0


class JournaledQueue:
    """Upload queue of one directory, shared by the uploader's threads and stored in its journal.

    Args:
        journal: journal of the directory, from which the queue is loaded.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.order: UploadQueue = journal.load()
        self.changed = threading.Condition(threading.RLock())
        self._trouble = journal.get("trouble")

    def do(self, transition: Callable[[UploadQueue], Writes]) -> None:
        """Change the queue, and record the change in the journal.

        Blocks: while the journal cannot be written. Until then, a kill loses the change.
        """
        with self.changed:
            writes = transition(self.order)
            while writes:
                try:
                    self.journal.write(writes)
                    break
                except RetryLater as error:
                    _log.warning("%s Trying again.", error)
                    time.sleep(_PAUSE_S)
            self.changed.notify_all()

    def start_next(self, timeout_s: float) -> Upload | None:
        """Return the upload to do next, marked as started, or None.

        Blocks: until an upload is queued, at most `timeout_s`.
        """
        with self.changed:
            if not self.order.entries:
                self.changed.wait(timeout_s)
            entry = self.order.first()
            if entry is not None:
                self.order.begin(entry)
            return entry

    def set_problem(self, trouble: str) -> None:
        """Record why the first upload fails, for readers of the status. An empty string clears it."""
        if trouble == self._trouble:
            return
        if trouble:
            _log.warning(trouble)
        try:
            self.journal.set(trouble=trouble, trouble_unix_s=str(time.time()))
        except RetryLater as error:
            _log.error(error)
            return
        self._trouble = trouble
