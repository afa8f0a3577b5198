"""The engine contract: what every place that runs jobs must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.jobs.machine import Life
from holdfast.jobs.records import Record
from holdfast.jobs.status import Status
from holdfast.jobs.task.contents import Task


@dataclass(frozen=True, slots=True)
class Effect:
    """What an engine makes of a key of a task file, where that is not what the key says."""

    key: str  # path in the file, as resources.use_spot
    line: int
    what: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job as people and scripts see it."""

    id: int
    name: str
    engine: str
    task_id: str  # minted once, the same in every attempt
    status: Status
    attempt: int
    recoveries: int
    restarts_after_errors: int
    num_nodes: int
    submitted_unix_s: float
    started_unix_s: float | None  # the first attempt
    ended_unix_s: float | None
    step: int | None  # of the newest checkpoint that the job has told of
    reason: str  # why it stands where it stands, for people

    @classmethod
    def of(cls, record: Record, *, step: int | None = None, life: Life | None = None) -> Job:
        """What there is to see of a record; `life` where more is known than was written down."""
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
    """A line of a job's output."""

    node: int | None  # None: said of the job itself, where its status has changed
    text: str


class Engine(ABC):
    """A place that runs jobs."""

    name: str
    """As `--on` has it."""

    @abstractmethod
    def effects(self, task: Task) -> list[Effect]:
        """The keys of a task that mean less here than they say."""

    @abstractmethod
    def handover(self, task: Task) -> list[str]:
        """What the engine would hand to whatever runs jobs for it, in lines; empty where nobody else does."""

    @abstractmethod
    def check(self, task: Task) -> None:
        """Refuse what cannot be run here, before anything is done; sends nothing over a network.

        Raises:
            Unsupported: this version cannot.
            InvalidInput: nobody could.
        """

    @abstractmethod
    def submit(self, task: Task) -> Job:
        """Take a task over. It goes on by itself from here, whatever becomes of the caller.

        Raises:
            HoldfastError: see `check`; or it could not be written down. Nothing was started then.

        Blocks: while the workdir is copied.
        """

    @abstractmethod
    def jobs(self) -> list[Job]:
        """All jobs of this engine, the newest last; those that nobody looked after are looked after again."""

    @abstractmethod
    def job(self, number: int) -> Job:
        """One job.

        Raises:
            NotFound: there is none with this number.
        """

    @abstractmethod
    def cancel(self, number: int) -> Job:
        """End a job for good: a notice first, so that it can save; then by force.

        Raises:
            NotFound: no such job.
            Conflict: it has ended already.
        """

    @abstractmethod
    def preempt(self, number: int, *, lead_s: float) -> Job:
        """Take the job's machines away, as a cloud would: a notice, and after `lead_s` seconds the end.

        Raises:
            NotFound: no such job.
            Conflict: no process of it is there to be preempted.
        """

    @abstractmethod
    def forget(self, number: int, *, force: bool = False) -> None:
        """Remove a job that has ended, with its files and output; what is in buckets stays.

        Args:
            number: of the job.
            force: also if files of it are lost with that, which are in no bucket.

        Raises:
            NotFound: no such job.
            Conflict: it has not ended; or it wrote files that are not in their bucket, without `force`.
        """

    @abstractmethod
    def lines(self, number: int, *, follow: bool, with_changes: bool = False) -> Iterator[Line]:
        """The output so far, or with `follow` all there will be until the job has ended.

        Args:
            number: of the job.
            follow: wait for more.
            with_changes: tell changes of the status too, as they are made.

        Raises:
            NotFound: no such job.
        """
