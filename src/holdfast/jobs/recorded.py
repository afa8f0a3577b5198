"""Shared part of all engines: jobs in this user's records, and output in the jobs' folders."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from typing_extensions import override

from holdfast.errors import Conflict, NotFound
from holdfast.jobs.engine import Engine, Job
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.node.removal import remove
from holdfast.jobs.notifications import announce
from holdfast.jobs.output.block import OutputBlock, OutputSelection
from holdfast.jobs.output.log_reader import FolderWatch, LogReader, interleaved
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.state_machine import JobState
from holdfast.system.environment import read_progress
from holdfast.system.units import plural

_QUERY_S = 0.2
"""Pause between two queries of a followed job's status."""


class RecordedEngine(Engine):
    """Engine whose jobs are in this user's records.

    Args:
        state: folder of all jobs. Default: that of this user.
    """

    def __init__(self, state: Path | None = None) -> None:
        self._state = state or state_dir()

    @abstractmethod
    def _current(self, records: list[JobRecord]) -> list[Job]:
        """Return the current jobs of some records."""

    @override
    def jobs(self) -> list[Job]:
        return self._current(self._records().all(self.name))

    @override
    def job(self, number: int) -> Job:
        (found,) = self._current([self._record(number)])
        return found

    @override
    def forget(self, number: int, *, force: bool = False) -> None:
        remove(self._records(), self._state, number, force=force)

    @override
    def output(self, number: int, what: OutputSelection) -> Iterator[OutputBlock]:
        num_nodes, node = self._record(number).spec.num_nodes, what.node
        if node is not None and node >= num_nodes:
            nodes = plural(num_nodes, "node")
            raise NotFound(f"Job {number} has no node {node}: it has {nodes}, counted from 0.")
        ranks = range(num_nodes) if node is None else (node,)
        folder = job_folder(self._state, number)
        is_timed = what.is_timed or len(ranks) > 1
        readers: dict[int | None, LogReader] = {None: LogReader(folder.changed)} if what.with_changes else {}
        readers |= {rank: LogReader(folder.log(rank), tail=what.tail, is_timed=is_timed) for rank in ranks}
        with contextlib.ExitStack() as stack:
            for reader in readers.values():
                stack.callback(reader.close)
            if not what.follow:
                yield from interleaved(readers, is_end=True)
                return
            watch = FolderWatch(folder.path, folder.logs)
            stack.callback(watch.close)
            yield from self._follow(number, readers, watch, with_progress=what.with_progress)

    def _follow(
        self,
        number: int,
        readers: Mapping[int | None, LogReader],
        watch: FolderWatch,
        *,
        with_progress: bool,
    ) -> Iterator[OutputBlock]:
        """Yield output until the job has ended. Its status is queried at most a few times a second."""
        shown = b""
        next_query_s = 0.0
        while True:
            is_end = False
            if time.monotonic() >= next_query_s:
                is_end = self.job(number).status.is_final  # before the last output is read
                next_query_s = time.monotonic() + _QUERY_S
            yield from interleaved(readers, is_end=is_end)
            if is_end:
                return
            if with_progress and len(readers) == 1:
                ((node, reader),) = readers.items()
                if reader.progress and reader.progress != shown:
                    shown = reader.progress
                    yield OutputBlock(node, shown, time.time(), is_progress=True)
            watch.wait(self.poll_s if time.monotonic() >= next_query_s else _QUERY_S)

    def _records(self) -> Records:
        return Records(self._state)

    def _record(self, number: int) -> JobRecord:
        return self._records().get(number)

    def _announce(self, record: JobRecord, job_state: JobState) -> None:
        """Send the notification of a status, if the controller was killed before it did so."""
        folder = job_folder(self._state, record.id)
        announce(folder, job_state, log=folder.controller_log)

    def _newest_step(self, record: JobRecord) -> int | None:
        """Return the newest step that a job has reported, or None."""
        progress = read_progress(job_folder(self._state, record.id).progress)
        return max(progress.values(), default=None)


def check_active(job: Job) -> None:
    """Check that a job has not ended.

    Raises:
        Conflict: the job has ended.
    """
    if job.status.is_final:
        raise Conflict(f"Job {job.id} has already ended: {job.status.value}.")


def no_process(job: Job) -> Conflict:
    """Return the error for a preemption of a job without processes."""
    return Conflict(f"Job {job.id} is {job.status.value} and has no process to preempt. Nothing was changed.")
