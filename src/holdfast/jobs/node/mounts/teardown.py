"""Teardown of an attempt's mounts after its nodes have exited, and the wait for uploads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.errors import Conflict
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.lease import LOCK, job_environment
from holdfast.jobs.node.mounts.mount_spec import caches, read_mount_specs
from holdfast.jobs.node.mounts.unsent_files import UNSENT, read_unsent
from holdfast.jobs.node.spawn import spawn_once
from holdfast.system.linux import locks

_PORTER_LIMIT_S = 15.0
"""Time limit for a released mounter to unmount."""
_KEEPERS_LIMIT_S = 60.0
"""Time limit for keepers to write the staged saves of a completed job."""
_PAUSE_S = 1.0
"""Pause between two starts of an upload watcher."""


class Teardown:
    """Unmounts an attempt's mounts, and waits for uploads of write-back directories.

    Args:
        folder: folder of the job, or its scratch folder on this machine.
        log: file for the output of the upload watcher. Default: that of the first node.
        environment: returns the environment of the upload watcher. Default: that of the job.
    """

    def __init__(
        self,
        folder: JobFolder,
        attempt: int,
        *,
        log: Path | None = None,
        environment: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self._folder = folder
        self._log = log or folder.log(0)
        self._environment = environment or (lambda: job_environment(folder))
        self._path = folder.attempt(attempt)
        self._specs = read_mount_specs(folder)
        self._caches = caches(folder)
        self._give_up_s: float | None = None
        self._keepers_s: float | None = None
        self._again_s = 0.0

    def is_over(self, until_unix_s: float | None, has_keepers: Callable[[], bool]) -> bool:
        """Make progress, and return True if the teardown is complete.

        Args:
            until_unix_s: deadline for waiting for uploads. None: wait as long as it takes.
            has_keepers: returns True if keepers of the attempt may still write.

        Raises:
            Conflict: files can never be uploaded, or a file system cannot be unmounted.
        """
        if not self._specs:
            return True
        if self._has_mounter():
            return False
        fuse.unmount_below(self._folder.path)
        if not self._caches:
            return True
        if until_unix_s is None and time.monotonic() < self._keepers_until_s() and has_keepers():
            return False
        return self._is_sent(until_unix_s)

    def missing(self) -> str:
        """Return which files are not uploaded. Empty for none, or if that has not been checked."""
        unsent = read_unsent(self._path / UNSENT) if self._caches else None
        return unsent.summary if unsent is not None else ""

    def last_missing(self) -> str:
        """Return which files of an ended job are missing, and upload them in the background.

        Blocks: for a scan of all files.
        """
        if not self._caches:
            return ""
        # Here, because it takes as long to import as all else, and most jobs do not need it.
        from holdfast.jobs.node.mounts.upload_watcher import upload_status

        unsent = upload_status(self._folder)
        if not unsent.is_settled:
            self._start_upload_watcher()
        return unsent.summary

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
            raise Conflict(
                f"The job has completed its work, but some of its files cannot be uploaded: {unsent.summary}"
            )
        self._start_upload_watcher()
        return False

    def _has_mounter(self) -> bool:
        """Return True if the mounter is running. Kills one that hangs."""
        if not locks.is_held(self._path / "mounter" / LOCK):
            return False
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + _PORTER_LIMIT_S
        if time.monotonic() > self._give_up_s:
            processes.kill(processes.servants("mounter", self._path / "mounter"))
        return True

    def _start_upload_watcher(self) -> None:
        if time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + _PAUSE_S
        self._path.mkdir(parents=True, exist_ok=True)
        spawn_once(
            "upload_watcher",
            self._path,
            log=self._log,
            lock=self._path / "upload_watcher.lock",
            environment=self._environment(),
        )
