"""Mounts of an attempt, as its nodes and its controller see them.

Both start the mounter: the nodes to hold the mounts, the controller to upload what is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from holdfast.errors import Conflict
from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import read_document
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.mount_records import caches, read_mount_specs
from holdfast.jobs.node.roles import Lease, ProcessRole
from holdfast.jobs.node_spec import read_environment

HOLDERS, READY, UPLOADS = "holders", "ready", "uploads"
"""Files of the mounter: a FIFO whose writers keep it alive, its result for waiting nodes, and a file that
exists if it is to upload what is left."""
UNSENT = "unsent.json"  # file in the folder of the attempt, with the newest status of the uploads
_RELEASE_LIMIT_S = 15.0  # time limit for a released mounter to unmount
_KEEPERS_LIMIT_S = 60.0  # time limit for keepers to write the staged saves of a completed job
_PAUSE_S = 1.0  # pause between two starts of a mounter that uploads


@dataclass(frozen=True, slots=True)
class UnsentFiles:
    """Files of a job's write-back directories that are not uploaded."""

    is_settled: bool  # nothing more can be uploaded
    is_hopeless: bool  # no uploader will continue
    summary: str  # a sentence for each directory with missing files


@dataclass(frozen=True, slots=True)
class MountResult:
    """Result of a mounter for the nodes that wait: why the mounts failed; empty if they are ready."""

    error: str = ""


def mounter_of(attempt: Path) -> ProcessRole:
    """Return the role of an attempt's mounter."""
    return ProcessRole("mounter", attempt / "mounter", attempt / "mounter" / "lock")


def job_environment(job: JobFolder) -> dict[str, str]:
    """Return the environment for a job's mounts, which contains the job's credentials."""
    document = read_environment(job)
    return {name: value for name, value in {**document.base, **document.task}.items() if name != TAG}


class Mounts(Lease):
    """Mounts of an attempt on this machine: attached by its nodes, released and uploaded after their end.

    Args:
        log: file for the output of the mounter. Default: that of the first node.
        environment: returns the environment of the mounter, with the job's credentials. It raises
            `FileNotFoundError` if the job has ended.
    """

    def __init__(
        self,
        folder: JobFolder,
        attempt: int,
        *,
        log: Path | None = None,
        environment: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self.folder = folder  # of the job, or its scratch folder on this machine
        super().__init__(
            folder.attempt(attempt), mounter_of(folder.attempt(attempt)), "its mounts were ready"
        )
        self._log = log or folder.log(0)
        self._environment = environment or (lambda: job_environment(folder))
        self.specs, self._caches = read_mount_specs(folder), caches(folder)
        self._fd: int | None = None  # keeps the mounts in place
        self._give_up_s: float | None = None
        self._keepers_s: float | None = None
        self._next_upload_s = 0.0

    # -- attached --------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Keep the mounts in place as long as this process lives, or until the lease ends."""
        holders = self._role.folder / HOLDERS
        holders.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        found = read_document(self._role.folder / READY, MountResult)
        return None if found is None else found.error

    @override
    def _start(self) -> bool:
        if self._role.is_alive:
            return False
        try:
            environment = self._environment()
        except FileNotFoundError:
            return False  # the job has ended, and this node is being killed
        return self._role.start(self._log, environment=environment)

    # -- released --------------------------------------------------------------------------------------------

    def is_over(self, until_unix_s: float | None, has_keepers: Callable[[], bool]) -> bool:
        """Make progress, and return True if nothing is mounted and, until the deadline, all is uploaded."""
        if not self.specs:
            return True
        if not self._is_released():
            return False
        fuse.unmount_below(self.folder.path)
        if not self._caches:
            return True
        self._keepers_s = self._keepers_s or time.monotonic() + _KEEPERS_LIMIT_S
        if until_unix_s is None and time.monotonic() < self._keepers_s and has_keepers():
            return False
        return self._is_sent(until_unix_s)

    def unsent(self) -> UnsentFiles | None:
        """Return the newest status of uploads, or None if it has not been checked."""
        return read_document(self._attempt / UNSENT, UnsentFiles) if self._caches else None

    def missing(self) -> str:
        """Return which files are not uploaded. Empty for none, or if that has not been checked."""
        return unsent.summary if (unsent := self.unsent()) else ""

    def last_missing(self) -> str:
        """Return which files of an ended job are missing, from a scan, and upload them in the background."""
        if not self._caches:
            return ""
        # Most jobs do not need it, and its import takes as long as all others.
        from holdfast.jobs.node.mounts.uploads import upload_status

        unsent = upload_status(self.folder)
        if not unsent.is_settled:
            self._upload()
        return unsent.summary

    def _is_released(self) -> bool:
        """Return True if no mounter holds the mounts any more. Kills one that hangs."""
        if not self._role.is_alive or (self._role.folder / UPLOADS).exists():
            return True
        self._give_up_s = self._give_up_s or time.monotonic() + _RELEASE_LIMIT_S
        if time.monotonic() > self._give_up_s:
            self._role.kill()
        return False

    def _is_sent(self, until_unix_s: float | None) -> bool:
        unsent = self.unsent()
        if unsent is not None and unsent.is_settled:
            return True
        if until_unix_s is not None and time.time() >= until_unix_s:
            return True
        if unsent is not None and unsent.is_hopeless and until_unix_s is None:
            raise Conflict(
                f"The job has completed its work, but some of its files cannot be uploaded: {unsent.summary}"
            )
        self._upload()
        return False

    def _upload(self) -> None:
        """Have a mounter upload what is left, unless one is running."""
        if time.monotonic() < self._next_upload_s:
            return
        self._next_upload_s = time.monotonic() + _PAUSE_S
        folder = self._role.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._role.start(
            self._log, environment=self._environment(), before=lambda: (folder / UPLOADS).touch()
        )
