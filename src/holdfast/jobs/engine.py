"""The interface of engines, which run jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.jobs.records import JobRecord
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """Task-file key that an engine ignores or interprets differently."""

    key: str  # path in the file, such as resources.use_spot
    line: int
    what: str


@dataclass(frozen=True, slots=True)
class Job:
    """Job as shown to users and scripts."""

    id: int
    name: str
    engine: str
    task_id: str  # created once, the same in every attempt
    status: JobStatus
    attempt: int
    recoveries: int
    restarts_after_errors: int
    num_nodes: int
    submitted_unix_s: float
    started_unix_s: float | None  # start of the first attempt
    ended_unix_s: float | None
    step: int | None  # newest checkpoint that the job has reported
    reason: str  # why the job has its status, for people

    @classmethod
    def of(cls, record: JobRecord, *, step: int | None = None, life: JobState | None = None) -> Job:
        """Return the job of a record. `life` overrides the recorded state."""
        life = life or record.life
        return cls(
            id=record.id,
            name=record.name,
            engine=record.engine,
            task_id=record.task_id,
            status=life.status,
            attempt=life.attempt,
            recoveries=life.recoveries,
            restarts_after_errors=life.num_errors,
            num_nodes=record.spec.num_nodes,
            submitted_unix_s=record.submitted_unix_s,
            started_unix_s=record.started_unix_s,
            ended_unix_s=record.ended_unix_s,
            step=step,
            reason=life.reason,
        )


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a job's output."""

    node: int | None  # None: a change of the job's status
    text: str


class Engine(ABC):
    """Place that runs jobs."""

    name: str
    """Name of the engine, as in `--on`."""

    @abstractmethod
    def unsupported_keys(self, task: Task) -> list[UnsupportedKey]:
        """Return the keys of a task that this engine ignores or interprets differently."""

    @abstractmethod
    def render(self, task: Task) -> list[str]:
        """Return the lines that this engine would submit to another system, if any."""

    @abstractmethod
    def check(self, task: Task) -> None:
        """Check that the engine can run a task, without changing or sending anything.

        Raises:
            Unsupported: this version cannot run the task.
            InvalidInput: the task is invalid.
        """

    @abstractmethod
    def submit(self, task: Task) -> Job:
        """Submit a task. From then on the job is independent of the calling process.

        Raises:
            HoldfastError: see `check`, or the job could not be recorded. Nothing was started.

        Blocks: while the workdir is copied.
        """

    @abstractmethod
    def jobs(self) -> list[Job]:
        """Return all jobs of this engine, newest last. Restarts missing controllers."""

    @abstractmethod
    def job(self, number: int) -> Job:
        """Return a job.

        Raises:
            NotFound: the job does not exist.
        """

    @abstractmethod
    def cancel(self, number: int) -> Job:
        """Cancel a job: send a notice, so that it can save, and kill it after the grace period.

        Raises:
            NotFound: the job does not exist.
            Conflict: the job has ended.
        """

    @abstractmethod
    def preempt(self, number: int, *, lead_s: float) -> Job:
        """Simulate a preemption: send a notice, and kill all processes after `lead_s` seconds.

        Raises:
            NotFound: the job does not exist.
            Conflict: the job has no process to preempt.
        """

    @abstractmethod
    def forget(self, number: int, *, force: bool = False) -> None:
        """Remove a job that has ended, with its files and output. Contents of buckets stay.

        Args:
            force: remove the job even if this loses files that are not in a bucket.

        Raises:
            NotFound: the job does not exist.
            Conflict: the job has not ended or, without `force`, has files that are not in their bucket.
        """

    @abstractmethod
    def lines(self, number: int, *, follow: bool, with_changes: bool = False) -> Iterator[Line]:
        """Yield the output so far or, with `follow`, until the job ends.

        Args:
            with_changes: also yield changes of the status.

        Raises:
            NotFound: the job does not exist.
        """
