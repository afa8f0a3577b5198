"""The interface of engines, which run jobs."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.errors import HoldfastError, Unsupported
from holdfast.jobs.output.block import OutputBlock, OutputSelection, texts
from holdfast.jobs.records import JobRecord
from holdfast.jobs.state_machine import JobState, exit_status
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task, TaskFile
from holdfast.jobs.task.subscription import subscribe
from holdfast.system.environment import NOTIFY
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """Task-file key that an engine ignores or interprets differently."""

    key: str  # path in the file, such as resources.use_spot
    line: int
    what: str


@dataclass(frozen=True, slots=True)
class Job:
    """Job as shown to users and scripts.

    Attributes:
        id: its number.
        name: its name, from the task file or chosen at launch.
        engine: name of its engine, such as "local".
        task_id: its SKYPILOT_TASK_ID, the same in every attempt.
        status: its status.
        attempt: number of its newest attempt; 0 before the first.
        recoveries: attempts that were started because the one before ended early.
        restarts_after_errors: of these, those after errors of its commands.
        num_nodes: number of its nodes.
        submitted_unix_s: time of its submission.
        started_unix_s: start of its first attempt.
        ended_unix_s: time of its end.
        step: newest checkpoint that it has reported.
        reason: why it has its status, for people. The first line is a summary.
        engine_job_id: the engine's own id of it.
        exit_status: 0 unless it has ended without success; then that of its command, or 1.
        after: the job that must succeed before it starts, in a pipeline.
        priority: its priority among jobs that wait.
        gpus: the GPUs that were given to each node, by rank.
    """

    id: int
    name: str
    engine: str
    task_id: str
    status: JobStatus
    attempt: int
    recoveries: int
    restarts_after_errors: int
    num_nodes: int
    submitted_unix_s: float
    started_unix_s: float | None
    ended_unix_s: float | None
    step: int | None
    reason: str
    engine_job_id: str | None = None
    exit_status: int = 0
    after: int | None = None
    priority: int = 0
    gpus: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, record: JobRecord, *, step: int | None = None, job_state: JobState | None = None) -> Job:
        """Return the job of a record. `job_state` overrides the recorded state."""
        job_state = job_state or record.job_state
        return cls(
            id=record.id,
            name=record.name,
            engine=record.engine,
            task_id=record.task_id,
            status=job_state.status,
            attempt=job_state.attempt,
            recoveries=job_state.recoveries,
            restarts_after_errors=job_state.num_errors,
            num_nodes=record.spec.num_nodes,
            submitted_unix_s=record.submitted_unix_s,
            started_unix_s=record.started_unix_s,
            ended_unix_s=record.ended_unix_s,
            step=step,
            reason=job_state.reason,
            engine_job_id=record.engine_job_id,
            exit_status=exit_status(job_state),
            after=record.spec.after,
            priority=record.spec.priority,
            gpus=record.gpus,
        )


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a job's output.

    Attributes:
        node: the node that wrote it; None for a change of the job's status.
        text: its text, without a line break.
        unix_s: time of writing, to the second, if it was recorded.
    """

    node: int | None
    text: str
    unix_s: float | None = None


class Engine(ABC):
    """Place that runs jobs."""

    name: str
    """Name of the engine, as in `--on`."""
    can_notify = False
    """True if the jobs of the engine send notifications."""
    is_here = False
    """True if jobs run on this machine, with the variables of the shell that launches them."""
    no_pipelines: str = ""
    """Why the engine does not run pipelines, and what to use instead. Empty if it does."""
    poll_s = 5.0
    """Interval for following a job, where the kernel reports no changes."""

    @abstractmethod
    def unsupported_keys(self, task: Task) -> list[UnsupportedKey]:
        """Return the keys of a task that this engine ignores or interprets differently."""

    def render(self, task: Task) -> list[str]:
        """Return the lines that this engine would submit to another system, if any."""
        return []

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

    def check_file(self, file: TaskFile) -> None:
        """Check that the engine can run all tasks of a file; see `check`."""
        if file.is_pipeline and self.no_pipelines:
            num_tasks = len(file.tasks)
            raise Unsupported(
                f"{file.path}: a pipeline of {num_tasks} tasks: {self.no_pipelines} Nothing was started."
            )
        for task in file.tasks:
            self.check(task)

    def submit_file(self, file: TaskFile) -> list[Job]:
        """Submit the tasks of a file; see `submit`. Each starts once the one before has succeeded."""
        self.check_file(file)
        return [self.submit(task) for task in file.tasks]

    def subscribed(
        self, file: TaskFile, targets: Sequence[str] | None, statuses: Sequence[str] | None
    ) -> TaskFile:
        """Return the tasks with the subscription of their launch; see `subscribe`."""
        subscription = subscribe(targets, statuses)
        if not subscription.targets:
            return file
        if not self.can_notify and targets is None:
            _log.warning("jobs on %s do not send notifications: %s is ignored", self.name, NOTIFY)
            return file
        if not self.can_notify:
            raise Unsupported(
                f"--notify: jobs on {self.name} do not send notifications, as no controller of Holdfast runs "
                "there. Use --on local or slurm, or have the task itself send a message. Nothing was started."
            )
        tasks = tuple(dataclasses.replace(task, subscription=subscription) for task in file.tasks)
        return dataclasses.replace(file, tasks=tasks)

    @abstractmethod
    def jobs(self) -> list[Job]:
        """Return all jobs of this engine, newest last. Restarts missing controllers."""

    @abstractmethod
    def job(self, number: int) -> Job:
        """Return a job."""

    @abstractmethod
    def cancel(self, number: int) -> Job:
        """Cancel a job: send a notice, so that it can save, and kill it after the grace period.

        Raises:
            NotFound: the job does not exist.
            Conflict: the job has ended.
        """

    def cancel_all(self, numbers: Sequence[int]) -> list[Job | HoldfastError]:
        """Cancel all jobs that can be, and return each, or the error of `cancel`."""
        return list(each(self.cancel, numbers))

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
    def output(self, number: int, what: OutputSelection) -> Iterator[OutputBlock]:
        """Yield output. The blocks of several nodes are in the order of their times."""

    def lines(self, number: int, what: OutputSelection) -> Iterator[Line]:
        """Yield the lines of the output with their times. Very long lines come in parts."""
        for block in self.output(number, dataclasses.replace(what, is_timed=True)):
            yield from (Line(block.node, text, block.unix_s) for text in texts(block))


def each(act: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R | HoldfastError]:
    """Yield the result of an action for each item, or the error that it raised."""
    for item in items:
        try:
            yield act(item)
        except HoldfastError as error:
            yield error


def sorted_out(results: Iterable[_R | HoldfastError]) -> tuple[list[_R], list[HoldfastError]]:
    """Return the results that are values, and those that are errors."""
    done: list[_R] = []
    errors: list[HoldfastError] = []
    for one in results:
        if isinstance(one, HoldfastError):
            errors.append(one)
        else:
            done.append(one)
    return done, errors


def all_of(results: Iterable[_R | HoldfastError]) -> list[_R]:
    """Return the results, or raise an error of the class of the first and with the messages of all."""
    done, errors = sorted_out(results)
    if errors:
        raise type(errors[0])("\n".join(map(str, errors))) from errors[0]
    return done
