"""Mounts of a Slurm job on all its nodes, as their runners report them, and the terms of their uploads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping

from holdfast.errors import Conflict
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import read_document
from holdfast.jobs.node.mounts.lease import UnsentFiles
from holdfast.jobs.node.mounts.mount_spec import caches, read_mount_specs
from holdfast.jobs.node.mounts.scratch import SCRATCH
from holdfast.jobs.slurm import messages
from holdfast.jobs.slurm.job_files import NodeUploads
from holdfast.jobs.slurm.messages import EndUploads
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus

_REPORT_S = 5.0
"""Time between the end of uploads and that of the machine, to report and record what is missing."""
_LIMIT_S = 3600.0
"""Time limit for an attempt that has failed and has no other deadline. Until then, it keeps its machines."""


class ClusterMounts:
    """Mounts of the newest attempt of a job.

    Args:
        uploads: what is known about the uploads, by node, from an earlier controller.
    """

    def __init__(self, job: JobFolder, num_nodes: int, uploads: Mapping[int, NodeUploads]) -> None:
        self._num_nodes = num_nodes
        self.has_some = bool(read_mount_specs(job))  # true if the job has mounts in scratch folders
        self._has_caches = bool(caches(job))
        self.uploads = dict(uploads)
        self._limit_unix_s: float | None = None  # for uploads, as Slurm is about to take the machines
        self._ended_unix_s: float | None = None
        self.forget_step()

    def forget(self) -> None:
        """Forget the attempt, as a new one begins."""
        self.uploads.clear()
        self._limit_unix_s = self._ended_unix_s = None
        self.forget_step()

    def forget_step(self) -> None:
        """Forget the runners, as others take their places."""
        self._sent: set[int] = set()
        self._missing: dict[int, str] = {}
        self.terms: EndUploads | None = None  # the last terms of uploads that were sent to the runners

    def note(self, message: messages.Message) -> bool:
        """Note a message of a runner. Return True if `uploads` has changed."""
        if isinstance(message, messages.ScratchOpened):
            self.uploads[message.node] = NodeUploads(message.machine, message.path)
            return True
        if isinstance(message, messages.UploadsEnded):
            known = self.uploads.get(message.node)
            if known is not None:
                self.uploads[message.node] = dataclasses.replace(
                    known, missing=message.missing, is_settled=message.is_settled
                )
            return known is not None
        if isinstance(message, messages.LeftoversSent):
            self._sent.add(message.node)
        if isinstance(message, messages.NodeUploading):
            self._missing[message.node] = message.missing
        return False

    def read_ends(self, job: JobFolder, attempt: int) -> None:
        """Read the ends of uploads that no controller has received, as it was killed."""
        for node, one in list(self.uploads.items()):
            if one.missing is None and (unsent := read_document(job.node(attempt, node).unsent, UnsentFiles)):
                self.note(messages.UploadsEnded(node, unsent.summary, unsent.is_settled))

    def may_open(self) -> bool:
        """Return True if no machine has leftovers of earlier attempts any more."""
        return len(self._sent) == self._num_nodes

    def common_path(self, key: str) -> str:
        """Return the path of the scratch folders, for a link that all nodes see.

        Args:
            key: key of the mount in the task file.
        """
        paths = {one.path: one.machine for one in self.uploads.values()}
        if len(paths) > 1:
            found = ", ".join(f"{path} on {machine}" for path, machine in paths.items())
            raise Conflict(
                f"file_mounts.{key}: all nodes see one link at this path, and their folders for it have "
                f"different paths: {found}. Choose a path relative to the workdir, or set {SCRATCH} to a "
                "folder with the same path on all nodes."
            )
        return next(iter(paths))

    def missing(self) -> str:
        """Return which files are not uploaded yet, while uploads continue."""
        return "; ".join(f"node {node}: {text}" for node, text in sorted(self._missing.items()))

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

    def take_terms(self, state: JobState, notice_unix_s: float | None, *, leaves: bool) -> EndUploads | None:
        """Return the terms of uploads after the end of all commands, or None if they were sent.

        Args:
            notice_unix_s: deadline of the notice that the attempt has received, if any.
            leaves: True if the job does not continue on these machines.
        """
        terms = EndUploads(self._until_unix_s(state, notice_unix_s, leaves=leaves), leaves)
        if terms == self.terms:
            return None
        self.terms = terms
        return terms

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
