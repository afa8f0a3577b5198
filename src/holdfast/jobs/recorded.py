"""Shared part of all engines: jobs in this user's records, and output in the jobs' folders."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from holdfast.environment import read_progress
from holdfast.errors import Conflict
from holdfast.jobs.engine import Engine, Job, Line
from holdfast.jobs.node.folder import job_folder
from holdfast.jobs.node.removal import remove
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.state_folder import state_dir
from holdfast.jobs.tail import FolderWatch, LineReader


class RecordedEngine(Engine):
    """Engine whose jobs are in this user's records.

    Args:
        state: folder of all jobs. Default: that of this user.
    """

    poll_s = 5.0
    """Interval for following output, where the kernel reports no changes."""

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
    def lines(self, number: int, *, follow: bool, with_changes: bool = False) -> Iterator[Line]:
        num_nodes = self._record(number).spec.num_nodes
        folder = job_folder(self._state, number)
        readers: dict[int | None, LineReader] = {None: LineReader(folder.changed)} if with_changes else {}
        readers.update({rank: LineReader(folder.log(rank)) for rank in range(num_nodes)})
        with contextlib.ExitStack() as stack:
            for reader in readers.values():
                stack.callback(reader.close)
            watch = FolderWatch(folder.path, folder.logs)
            stack.callback(watch.close)
            is_end = not follow
            while True:
                is_end = is_end or self.job(number).status.is_final  # before the last output is read
                for node, reader in readers.items():
                    yield from (Line(node, text) for text in reader.lines(is_end=is_end))
                if is_end:
                    return
                watch.wait(self.poll_s)

    def _records(self) -> Records:
        return Records(self._state)

    def _record(self, number: int) -> JobRecord:
        return self._records().get(number)

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
