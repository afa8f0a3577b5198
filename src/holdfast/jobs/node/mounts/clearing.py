"""What an attempt's mounts leave to be done when its nodes have ended, as the controller sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from holdfast.errors import Conflict
from holdfast.jobs.node import locks, processes
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.drainer import UNSENT, Unsent, look_at, read_unsent
from holdfast.jobs.node.mounts.hold import job_environment
from holdfast.jobs.node.mounts.porter import LOCK
from holdfast.jobs.node.mounts.supply import caches, read_supplies
from holdfast.jobs.node.spawning import spawn

_PORTER_LIMIT_S = 15.0
"""How long a porter that nobody holds may take to unmount."""
_KEEPERS_LIMIT_S = 60.0
"""How long keepers may take to write what a job that is done has staged."""
_PAUSE_S = 1.0
"""Between two starts of a drainer."""


class Clearing:
    """Unmounts, and has what was written sent.

    Args:
        folder: of the job.
        attempt: that has ended.
    """

    def __init__(self, folder: JobFolder, attempt: int) -> None:
        self._folder = folder
        self._path = folder.attempt(attempt)
        self._supplies = read_supplies(folder)
        self._caches = caches(folder)
        self._give_up_s: float | None = None
        self._keepers_s: float | None = None
        self._again_s = 0.0

    def is_over(self, until_unix_s: float | None, has_keepers: Callable[[], bool]) -> bool:
        """Do what can be done now; True if nothing is left to be waited for.

        Args:
            until_unix_s: the moment until which files are waited for that are not in their place yet; None
                for as long as it takes.
            has_keepers: whether keepers of the attempt may still write.

        Raises:
            Conflict: files will never be in their place, or something cannot be unmounted.
        """
        if not self._supplies:
            return True
        if self._has_porter():
            return False
        fuse.unmount_below(self._folder.path)
        if not self._caches:
            return True
        if until_unix_s is None and time.monotonic() < self._keepers_until_s() and has_keepers():
            return False
        return self._is_sent(until_unix_s)

    def told(self) -> str:
        """What is not in its place, in words; "" for nothing, or if nobody has looked."""
        unsent = read_unsent(self._path / UNSENT) if self._caches else None
        return unsent.told if unsent is not None else ""

    def last_told(self) -> str:
        """The same of a job that has ended, looked at now; what can still be sent is, in the background.

        Blocks: while it looks at every file.
        """
        if not self._caches:
            return ""
        unsent = look_at(self._folder)
        if not unsent.is_settled:
            self._start_drainer()
        return unsent.told

    def _keepers_until_s(self) -> float:
        if self._keepers_s is None:
            self._keepers_s = time.monotonic() + _KEEPERS_LIMIT_S
        return self._keepers_s

    def _is_sent(self, until_unix_s: float | None) -> bool:
        unsent = read_unsent(self._path / UNSENT)
        if unsent is not None and unsent.is_settled:
            return True
        if until_unix_s is not None and time.time() >= until_unix_s:
            return True
        if unsent is not None and unsent.is_hopeless and until_unix_s is None:
            raise Conflict(f"The job has done its work, but {_never(unsent)}")
        self._start_drainer()
        return False

    def _has_porter(self) -> bool:
        """Whether the porter is still at work; one that hangs is ended."""
        if not locks.is_held(self._path / "porter" / LOCK):
            return False
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + _PORTER_LIMIT_S
        if time.monotonic() > self._give_up_s:
            processes.end(processes.servants("porter", self._path / "porter"))
        return True

    def _start_drainer(self) -> None:
        if time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + _PAUSE_S
        self._path.mkdir(parents=True, exist_ok=True)
        lock = locks.take(self._path / "drainer.lock")
        if lock is None:
            return
        try:
            environment = job_environment(self._folder)
            spawn("drainer", self._path, log=self._folder.log(0), lock=lock, environment=environment)
        finally:
            os.close(lock)


def _never(unsent: Unsent) -> str:
    return f"not all that it wrote can be sent: {unsent.told}"
