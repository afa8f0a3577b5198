"""Mounts of a node in one attempt, in the job's scratch folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.errors import Conflict, HoldfastError, Internal, NotFound
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.lease import Teardown, UnsentFiles, mounter_of
from holdfast.jobs.node.mounts.links import create_links
from holdfast.jobs.node.mounts.mount_spec import caches
from holdfast.jobs.node.mounts.mounter import OPEN, SENT
from holdfast.jobs.node.mounts.scratch import (
    ScratchOwner,
    is_scratch_path,
    moved_links,
    open_scratch,
    read_scratch_owner,
    remove_scratch,
    scratch_folder,
    scratch_parent,
    write_scratch_mounts,
)
from holdfast.jobs.node.mounts.uploads import upload_status, wait_without_uploader
from holdfast.jobs.node.roles import STOPPED, ProcessRole
from holdfast.jobs.writeback import status_of
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_RANK = "rank"


class NodeMounts:
    """Mounts of a node, from opening the scratch folder to the end of uploads.

    Args:
        job: folder of the job.
        owner: owner of the scratch folder.
        log: file for the output of the mounts' processes.
        environment: environment of the job, with its credentials.
    """

    def __init__(
        self,
        job: JobFolder,
        owner: ScratchOwner,
        attempt: int,
        rank: int,
        *,
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._job, self._owner = job, owner
        self._attempt, self._rank = attempt, rank
        self._log, self._environment = log, environment
        self._scratch: JobFolder | None = None
        self._teardown: Teardown | None = None

    @property
    def scratch(self) -> JobFolder:
        """The scratch folder, once it is open."""
        if self._scratch is None:
            raise Internal("the scratch folder of the job is not open")
        return self._scratch

    def open(self, wakeup: Path, *, num_nodes: int) -> None:
        """Open the scratch folder for a new attempt, and create the workdir's links.

        Args:
            wakeup: FIFO that wakes this process.
        """
        scratch = scratch_folder(scratch_parent(self._environment), self._job, self._owner.task_id)
        open_scratch(scratch, self._owner)
        path = scratch.attempt(self._attempt)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / _RANK).write_text(str(self._rank))
        write_scratch_mounts(self._job, scratch, is_shared=num_nodes > 1)
        workdir = self._job.workdir(self._rank)
        create_links(
            [link for link in moved_links(self._job, scratch) if Path(link.target).is_relative_to(workdir)],
            is_in_use=lambda _: False,
            is_of_job=is_scratch_path,
        )
        self._use(scratch, wakeup)

    def reopen(self, wakeup: Path) -> bool:
        """Open the scratch folder to end the uploads of an attempt whose runner was killed.

        Returns:
            False if the node was on another machine.
        """
        scratch = scratch_folder(scratch_parent(self._environment), self._job, self._owner.task_id)
        if not scratch.path.is_dir() or read_scratch_owner(scratch) != self._owner:
            return False
        open_scratch(scratch, self._owner)
        rank = scratch.attempt(self._attempt) / _RANK
        if not rank.exists() or rank.read_text() != str(self._rank):
            return False
        self._use(scratch, wakeup)
        return True

    @property
    def are_leftovers_sent(self) -> bool:
        """True if everything that earlier attempts have left here is uploaded."""
        return (self._mounter.folder / SENT).exists()

    def allow(self) -> None:
        """Let the mounter mount: no machine has leftovers any more."""
        self._mounter.folder.mkdir(mode=0o700, exist_ok=True)
        (self._mounter.folder / OPEN).touch()

    def stop(self) -> None:
        """Let a node that waits for its mounts end."""
        (self.scratch.attempt(self._attempt) / STOPPED).touch()

    def are_over(self, until_unix_s: float | None, has_keepers: Callable[[], bool]) -> bool:
        """Make progress with unmounting and uploading; return True if nothing more happens.

        Args:
            until_unix_s: deadline of uploads. None: as long as it takes.
            has_keepers: returns True if keepers of the attempt may still write.
        """
        assert self._teardown is not None
        try:
            if self._teardown.is_over(until_unix_s, has_keepers):
                return True
        except Conflict:  # nothing more can be uploaded: `end` returns what is missing
            return True
        unsent = self._teardown.unsent()
        return unsent is not None and unsent.is_hopeless

    def missing(self) -> str:
        """Return which files are not uploaded yet, as the mounter has recorded."""
        assert self._teardown is not None
        return self._teardown.missing()

    def end(self) -> UnsentFiles:
        """End all processes of the mounts, and return which files are not in their buckets.

        Blocks: for a scan of all files, and some seconds for uploaders.
        """
        self._mounter.kill()
        for spec in caches(self.scratch):
            _end_uploader(Path(spec.path))
        unsent = upload_status(self.scratch)
        summary = f"on {self._owner.machine}, {unsent.summary}" if unsent.summary else ""
        return dataclasses.replace(unsent, summary=summary)

    def remove(self) -> None:
        """Remove the scratch folder. Files that are not uploaded stay."""
        try:
            remove_scratch(self.scratch)
        except (HoldfastError, OSError) as error:  # it costs disk space only
            _log.warning("%s on %s was not removed: %s", self.scratch.path, self._owner.machine, error)

    def _use(self, scratch: JobFolder, wakeup: Path) -> None:
        scratch.wakeup.unlink(missing_ok=True)
        scratch.wakeup.symlink_to(wakeup)
        self._scratch = scratch
        self._teardown = Teardown(
            scratch, self._attempt, log=self._log, environment=lambda: self._environment
        )

    @property
    def _mounter(self) -> ProcessRole:
        return mounter_of(self.scratch.attempt(self._attempt))


def _end_uploader(path: Path) -> None:
    """Wait until an uploader without work has exited, and kill one that has some."""
    with suppress(NotFound):
        status = status_of(path)
        if status.is_settled:
            wait_without_uploader(path)
        if (pid := status_of(path).pid) is not None and (process := processes.find(pid)) is not None:
            processes.kill([process])
