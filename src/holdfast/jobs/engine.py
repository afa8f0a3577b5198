"""Jobs as engines return them to users, and the results of an action on several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from msgspec import Struct

from holdfast.errors import HoldfastError
from holdfast.jobs.records import JobRecord
from holdfast.jobs.state_machine import exit_status
from holdfast.jobs.status import JobStatus

_T = TypeVar("_T")
_R = TypeVar("_R")


class UnsupportedKey(Struct, frozen=True):
    """Task-file key that an engine ignores or interprets differently."""

    key: str  # path in the file, such as resources.use_spot
    line: int
    what: str


class Job(Struct, frozen=True):
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
    def of(cls, record: JobRecord, *, step: int | None = None) -> Job:
        """Return the job of a record."""
        job, state, job_state = record.job, record.state, record.state.job_state
        of_job = ("name", "engine", "task_id", "submitted_unix_s")
        of_state = ("engine_job_id", "gpus", "started_unix_s", "ended_unix_s")
        return cls(
            id=job.number,
            **{name: getattr(job, name) for name in of_job},
            **{name: getattr(state, name) for name in of_state},
            status=job_state.status,
            attempt=job_state.attempt,
            recoveries=job_state.recoveries,
            restarts_after_errors=job_state.num_errors,
            num_nodes=job.spec.num_nodes,
            step=step,
            reason=job_state.reason,
            exit_status=exit_status(job_state),
            after=job.spec.after,
            priority=job.spec.priority,
        )


class Line(Struct, frozen=True):
    """Line of a job's output.

    Attributes:
        node: the node that wrote it; None for a change of the job's status.
        text: its text, without a line break.
        unix_s: time of writing, to the second, if it was recorded.
    """

    node: int | None
    text: str
    unix_s: float | None = None


def each(act: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R | HoldfastError]:
    """Yield the result of an action for each item, or the error that it raised."""
    for item in items:
        try:
            yield act(item)
        except HoldfastError as error:
            yield error


def sorted_out(results: Iterable[_R | HoldfastError]) -> tuple[list[_R], list[HoldfastError]]:
    """Return the results that are values, and those that are errors."""
    found = list(results)
    errors = [one for one in found if isinstance(one, HoldfastError)]
    return [one for one in found if not isinstance(one, HoldfastError)], errors


def all_of(results: Iterable[_R | HoldfastError]) -> list[_R]:
    """Return the results, or raise an error of the class of the first and with the messages of all."""
    done, errors = sorted_out(results)
    if errors:
        raise type(errors[0])("\n".join(map(str, errors))) from errors[0]
    return done
