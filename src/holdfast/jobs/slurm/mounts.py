"""Mounts of a Slurm job in one attempt: of a node, in its scratch folder, and of all nodes together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.errors import Conflict, HoldfastError, NotFound
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import read_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.lease import Teardown, UnsentFiles, mounter_of
from holdfast.jobs.node.mounts.mount_records import caches, create_links, read_mount_specs
from holdfast.jobs.node.mounts.mounter import OPEN, SENT
from holdfast.jobs.node.mounts.scratch import (
    SCRATCH,
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
from holdfast.jobs.node.roles import STOPPED
from holdfast.jobs.slurm.job_files import NodeUploads
from holdfast.jobs.slurm.messages import NodeReport, UploadTerms
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus
from holdfast.jobs.writeback import status_of
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_RANK = "rank"


class NodeMounts:
    """Mounts of a node, from opening the scratch folder to the end of uploads."""

    def __init__(
        self,
        job: JobFolder,
        owner: ScratchOwner,
        attempt: int,
        rank: int,
        *,
        log: Path,
        environment: Mapping[str, str],
        wakeup: Path,
    ) -> None:
        self.scratch = scratch_folder(scratch_parent(environment), job, owner.task_id)
        self._job, self._owner, self._attempt, self._rank = job, owner, attempt, str(rank)
        self._log, self._environment, self._wakeup = log, environment, wakeup
        self._path = self.scratch.attempt(attempt)
        self._mounter = mounter_of(self._path)
        self._teardown: Teardown | None = None

    def open(self, *, num_nodes: int) -> bool:
        """Open the scratch folder for a new attempt, and create the workdir's links. Return True."""
        open_scratch(self.scratch, self._owner)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._path / _RANK).write_text(self._rank)
        write_scratch_mounts(self._job, self.scratch, is_shared=num_nodes > 1)
        links, workdir = moved_links(self._job, self.scratch), self._job.workdir(int(self._rank))
        create_links(
            [link for link in links if Path(link.target).is_relative_to(workdir)],
            is_in_use=lambda _: False,
            is_of_job=is_scratch_path,
        )
        self._use()
        return True

    def reopen(self) -> bool:
        """Open the scratch folder to end the uploads of a killed runner, if that was on this machine."""
        if not self.scratch.path.is_dir() or read_scratch_owner(self.scratch) != self._owner:
            return False
        open_scratch(self.scratch, self._owner)
        rank = self._path / _RANK
        if not rank.exists() or rank.read_text() != self._rank:
            return False
        self._use()
        return True

    def _use(self) -> None:
        self.scratch.wakeup.unlink(missing_ok=True)
        self.scratch.wakeup.symlink_to(self._wakeup)
        environment = self._environment
        self._teardown = Teardown(self.scratch, self._attempt, log=self._log, environment=lambda: environment)

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
        (self._path / STOPPED).touch()

    def are_over(self, until_unix_s: float | None, has_keepers: Callable[[], bool]) -> bool:
        """Make progress with unmounting and uploading; return True if nothing more happens."""
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
        """End all processes of the mounts, and return which files are not in their buckets."""
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


def _end_uploader(path: Path) -> None:
    """Wait until an uploader without work has exited, and kill one that has some."""
    with suppress(NotFound):
        status = status_of(path)
        if status.is_settled:
            wait_without_uploader(path)
        if (pid := status_of(path).pid) is not None and (process := processes.find(pid)) is not None:
            processes.kill([process])


_REPORT_S = 5.0
"""Time between the end of uploads and that of the machine, to report and record what is missing."""
_LIMIT_S = 3600.0
"""Time limit for an attempt that has failed and has no other deadline. Until then, it keeps its machines."""


class ClusterMounts:
    """Mounts of the newest attempt of a job."""

    def __init__(self, job: JobFolder, num_nodes: int, uploads: Mapping[int, NodeUploads]) -> None:
        self._num_nodes = num_nodes
        self.has_some = bool(read_mount_specs(job))  # true if the job has mounts in scratch folders
        self._has_caches = bool(caches(job))
        self.uploads = dict(uploads)
        self._limit_unix_s: float | None = None  # for uploads, as Slurm is about to take the machines
        self._ended_unix_s: float | None = None

    def forget(self) -> None:
        """Forget the attempt, as a new one begins."""
        self.uploads.clear()
        self._limit_unix_s = self._ended_unix_s = None

    def note(self, reports: Mapping[int, NodeReport]) -> bool:
        """Note the newest reports of the runners. Return True if `uploads` has changed."""
        before = dict(self.uploads)
        for node, one in reports.items():
            if one.scratch:
                missing = one.missing if one.are_uploads_over else None
                self.uploads[node] = NodeUploads(one.machine, one.scratch, missing, one.is_settled)
        return self.uploads != before

    def read_ends(self, job: JobFolder, attempt: int) -> None:
        """Read the ends of uploads that no controller has received, as it was killed."""
        for node, one in list(self.uploads.items()):
            if one.missing is None and (unsent := read_document(job.node(attempt, node).unsent, UnsentFiles)):
                self.uploads[node] = dataclasses.replace(
                    one, missing=unsent.summary, is_settled=unsent.is_settled
                )

    def may_open(self, reports: Mapping[int, NodeReport]) -> bool:
        """Return True if no machine has leftovers of earlier attempts any more."""
        return sum(one.are_leftovers_sent for one in reports.values()) == self._num_nodes

    def common_path(self, key: str) -> str:
        """Return the path of the scratch folders, for a link that all nodes see."""
        paths = {one.path: one.machine for one in self.uploads.values()}
        if len(paths) > 1:
            found = ", ".join(f"{path} on {machine}" for path, machine in paths.items())
            raise Conflict(
                f"file_mounts.{key}: all nodes see one link at this path, and their folders for it have "
                f"different paths: {found}. Choose a path relative to the workdir, or set {SCRATCH} to a "
                "folder with the same path on all nodes."
            )
        return next(iter(paths))

    def is_confirmed(self) -> bool:
        """Return True if every node has reported the end of its uploads."""
        return not self._has_caches or (
            len(self.uploads) == self._num_nodes
            and all(one.missing is not None for one in self.uploads.values())
        )

    def lost(self) -> str:
        """Return which files should be in their buckets and are not, with their paths."""
        return self._texts(one for one in self.uploads.items() if not one[1].is_settled)

    def left(self) -> str:
        """Return which files are not in their buckets, also those that no upload sends."""
        return self._texts(self.uploads.items())

    def limit(self, until_unix_s: float) -> None:
        """Limit the uploads: Slurm is about to take the machines."""
        if self._limit_unix_s is None:
            self._limit_unix_s = until_unix_s

    @property
    def is_limited(self) -> bool:
        """True if Slurm takes the machines after the end of all commands."""
        return self._limit_unix_s is not None

    def terms(self, state: JobState, notice_unix_s: float | None, *, leaves: bool) -> UploadTerms:
        """Return the terms of uploads after the end of all commands."""
        return UploadTerms(self._until_unix_s(state, notice_unix_s, leaves=leaves), leaves)

    def _until_unix_s(self, state: JobState, notice_unix_s: float | None, *, leaves: bool) -> float | None:
        deadlines = [one - _REPORT_S for one in (self._limit_unix_s, notice_unix_s) if one is not None]
        if deadlines:
            return min(deadlines)
        is_complete = all(one.is_success for one in state.outcomes.values())
        if is_complete and state.status is not JobStatus.CANCELLING:
            return None
        if not leaves:
            return 0.0  # the next attempt begins with the uploads
        self._ended_unix_s = self._ended_unix_s or time.time()
        return self._ended_unix_s + _LIMIT_S

    def _texts(self, uploads: Iterable[tuple[int, NodeUploads]]) -> str:
        texts = [
            f"node {node}: {text}"
            for node, one in sorted(uploads, key=lambda one: one[0])
            if (text := _missing(one))
        ]
        return "; ".join(texts) if self._has_caches else ""


def _missing(uploads: NodeUploads) -> str:
    if uploads.missing is None:
        return (
            f"its uploads were not confirmed, and what is missing stays in {uploads.path} on "
            f"{uploads.machine}"
        )
    return uploads.missing
