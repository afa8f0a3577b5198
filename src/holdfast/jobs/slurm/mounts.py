"""Mounts of a Slurm job in one attempt: of a node, in its scratch folder, and of all nodes together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from holdfast.errors import Conflict, HoldfastError, NotFound
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import read_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.attempt import Mounts, UnsentFiles
from holdfast.jobs.node.mounts.mount_records import caches, create_links, read_mount_specs
from holdfast.jobs.node.mounts.mounter import OPEN, SENT
from holdfast.jobs.node.mounts.scratch import (
    SCRATCH,
    ScratchOwner,
    moved_links,
    open_scratch,
    read_scratch_owner,
    remove_scratch,
    scratch_folder,
    scratch_parent,
    write_scratch_mounts,
)
from holdfast.jobs.node.mounts.uploads import upload_status, wait_without_uploader
from holdfast.jobs.node_spec import machine_name
from holdfast.jobs.records import Submission
from holdfast.jobs.slurm.job_files import NodeReport, NodeUploads
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus
from holdfast.jobs.writeback import status_of
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_RANK = "rank"


def open_mounts(
    job: JobFolder,
    submission: Submission,
    attempt: int,
    rank: int,
    *,
    environment: Mapping[str, str],
    wakeup: Path,
    is_new: bool,
) -> NodeMounts | None:
    """Open the scratch folder of a node, and return its mounts.

    If the attempt is not new, only its uploads are to be ended, as its runner was killed. If that was on
    another machine, there is nothing to open.
    """
    owner = ScratchOwner(submission.task_id, str(job.path), machine_name())
    scratch = scratch_folder(scratch_parent(environment), job, owner.task_id)
    record = scratch.attempt(attempt) / _RANK
    if not is_new and (
        not scratch.path.is_dir()
        or read_scratch_owner(scratch) != owner
        or not record.exists()
        or record.read_text() != str(rank)
    ):
        return None
    open_scratch(scratch, owner)
    if is_new:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        record.write_text(str(rank))
        write_scratch_mounts(job, scratch, is_shared=submission.spec.num_nodes > 1)
        workdir = job.workdir(rank)
        links = [one for one in moved_links(job, scratch) if Path(one.target).is_relative_to(workdir)]
        create_links(links, job, None)
    scratch.wakeup.unlink(missing_ok=True)
    scratch.wakeup.symlink_to(wakeup)
    return NodeMounts(scratch, attempt, log=job.log(rank), environment=environment)


class NodeMounts(Mounts):
    """Mounts of a node in its scratch folder, which is open."""

    @property
    def are_leftovers_sent(self) -> bool:
        """True if everything that earlier attempts have left here is uploaded."""
        return (self.folder / SENT).exists()

    def allow(self) -> None:
        """Let the mounter mount: no machine has leftovers any more."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / OPEN).touch()

    def end(self) -> UnsentFiles:
        """End all processes of the mounts, and return which files are not in their buckets."""
        self.kill()
        for spec in self._caches:
            _end_uploader(Path(spec.path))
        unsent = upload_status(self.job)
        summary = f"on {machine_name()}, {unsent.summary}" if unsent.summary else ""
        return replace(unsent, summary=summary)

    def remove(self) -> None:
        """Remove the scratch folder. Files that are not uploaded stay."""
        try:
            remove_scratch(self.job)
        except (HoldfastError, OSError) as error:  # it costs disk space only
            _log.warning("%s on %s was not removed: %s", self.job.path, machine_name(), error)


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
        self.limit_unix_s: float | None = None  # of the uploads, if Slurm is about to take the machines
        self._ended_unix_s: float | None = None

    def note(self, reports: Mapping[int, NodeReport]) -> bool:
        """Note the newest reports of the runners. Return True if `uploads` has changed."""
        before = dict(self.uploads)
        self.uploads.update((node, one.uploads) for node, one in reports.items() if one.uploads is not None)
        return self.uploads != before

    def read_ends(self, job: JobFolder, attempt: int) -> None:
        """Read the ends of uploads that no controller has received, as it was killed."""
        for node, uploads in list(self.uploads.items()):
            unsent = read_document(job.node(attempt, node).unsent, UnsentFiles)
            if uploads.missing is None and unsent is not None:
                self.uploads[node] = replace(uploads, missing=unsent.summary, is_settled=unsent.is_settled)

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

    def missing(self, *, with_settled: bool = True) -> str:
        """Return which files are not in their buckets, by default also those that no upload sends."""
        texts: list[str] = []
        for node, uploads in sorted(self.uploads.items()):
            text = uploads.missing
            if text is None:
                where = f"{uploads.path} on {uploads.machine}"
                text = f"its uploads were not confirmed, and what is missing stays in {where}"
            if text and (with_settled or not uploads.is_settled):
                texts.append(f"node {node}: {text}")
        return "; ".join(texts) if self._has_caches else ""

    def until_unix_s(self, state: JobState, notice_unix_s: float | None, *, leaves: bool) -> float | None:
        """Return the deadline of uploads after the end of all commands. None: as long as it takes.

        `notice_unix_s` is that of a notice. The job `leaves` these machines if it does not continue there.
        """
        deadlines = [one - _REPORT_S for one in (self.limit_unix_s, notice_unix_s) if one is not None]
        if deadlines:
            return min(deadlines)
        is_complete = all(one.is_success for one in state.outcomes.values())
        if is_complete and state.status is not JobStatus.CANCELLING:
            return None
        if not leaves:
            return 0.0  # the next attempt begins with the uploads
        self._ended_unix_s = self._ended_unix_s or time.time()
        return self._ended_unix_s + _LIMIT_S
