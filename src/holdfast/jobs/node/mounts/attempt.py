"""Mounts of an attempt, as its nodes and its controller see them.

Both start the mounter: the nodes to hold the mounts, the controller to upload what is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from typing_extensions import override

from holdfast.errors import Conflict
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import read_document
from holdfast.jobs.node.mounts.mount_records import caches, read_mount_specs, unmount_below
from holdfast.jobs.node.roles import Server
from holdfast.jobs.node_spec import read_environment

HOLDERS, READY, UPLOADS = "holders", "ready", "uploads"
"""Files of the mounter: a FIFO whose writers keep it alive, why the mounts failed, which is empty if they are
ready, and a file that exists if it is to upload what is left."""
UNSENT = "unsent.json"  # file in the folder of the attempt, with the newest status of the uploads
_RELEASE_LIMIT_S = 15.0  # time limit for a released mounter to unmount
_KEEPERS_LIMIT_S = 60.0  # time limit for keepers to write the staged saves of a completed job


class UnsentFiles(Struct, frozen=True):
    """Files of a job's write-back directories that are not uploaded."""

    is_settled: bool  # nothing more can be uploaded
    is_hopeless: bool  # no uploader will continue
    summary: str  # a sentence for each directory with missing files


class Mounts(Server):
    """Mounts of an attempt on this machine, which one mounter serves to all of its nodes."""

    before_ready = "its mounts were ready"

    def __init__(
        self,
        job: JobFolder,
        attempt: int,
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("mounter", job.attempt(attempt) / "mounter", log or job.log(0))
        self.job, self.specs, self._caches = job, read_mount_specs(job), caches(job)
        self._environment = environment  # None: that of the job, with its credentials
        self._fd: int | None = None  # keeps the mounts in place
        self._give_up_s: float | None = None
        self._keepers_s: float | None = None

    # -- attached --------------------------------------------------------------------------------------------
    def attach(self) -> None:
        """Keep the mounts in place as long as this process lives, or until they are closed."""
        holders = self.folder / HOLDERS
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(holders, 0o600)
        self._fd = os.open(holders, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    @override
    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @override
    def _result(self) -> str | None:
        return read_document(self.folder / READY, str)

    @override
    def _prepare(self) -> Mapping[str, str] | None:
        if self._environment is not None:
            return self._environment
        try:
            document = read_environment(self.job)
        except FileNotFoundError:
            return None  # the job has ended, and this node is being killed
        return {**document.base, **document.task}

    # -- released --------------------------------------------------------------------------------------------
    def is_over(self, until_unix_s: float | None, has_keepers: Callable[[], bool]) -> bool:
        """Make progress with unmounting and uploading; return True if nothing more happens.

        That is the case once all is uploaded, no upload can continue, or the deadline is over.
        """
        if not self.specs:
            return True
        if self.is_alive and not (self.folder / UPLOADS).exists():
            self._give_up_s = self._give_up_s or time.monotonic() + _RELEASE_LIMIT_S
            if time.monotonic() > self._give_up_s:  # it hangs
                self.kill()
            return False
        unmount_below(self.job.path)
        if not self._caches:
            return True
        self._keepers_s = self._keepers_s or time.monotonic() + _KEEPERS_LIMIT_S
        if until_unix_s is None and time.monotonic() < self._keepers_s and has_keepers():
            return False
        unsent = self.unsent()
        if unsent is not None and (unsent.is_settled or unsent.is_hopeless):
            return True
        if until_unix_s is not None and time.time() >= until_unix_s:
            return True
        self._upload()
        return False

    def check_hope(self) -> None:
        """Raise if files of a completed job cannot be uploaded."""
        unsent = self.unsent()
        if unsent is not None and unsent.is_hopeless:
            raise Conflict(
                f"The job has completed its work, but some of its files cannot be uploaded: {unsent.summary}"
            )

    def unsent(self) -> UnsentFiles | None:
        """Return the newest status of uploads, or None if it has not been checked."""
        return read_document(self.folder.parent / UNSENT, UnsentFiles) if self._caches else None

    def missing(self) -> str:
        """Return which files are not uploaded. Empty for none, or if that has not been checked."""
        return unsent.summary if (unsent := self.unsent()) else ""

    def last_missing(self) -> str:
        """Return which files of an ended job are missing, from a scan, and upload them in the background."""
        if not self._caches:
            return ""
        # Most jobs do not need it, and its import takes as long as all others.
        from holdfast.jobs.node.mounts.uploads import upload_status

        unsent = upload_status(self.job)
        if not unsent.is_settled:
            self._again_s = 0.0  # nobody polls after this, so the last mounter does not wait for its turn
            self._upload()
        return unsent.summary

    def _upload(self) -> None:
        """Have a mounter upload what is left, unless one is running."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / UPLOADS).touch()  # no node needs the mounts any more: the next mounter only uploads
        self.poll()
