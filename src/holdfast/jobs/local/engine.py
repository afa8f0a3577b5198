"""The engine of this machine: takes tasks over as jobs, and sees that somebody looks after each of them."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from holdfast.errors import Conflict, HoldfastError, RetryLater
from holdfast.jobs import engine
from holdfast.jobs.engine import Effect, Job, Line
from holdfast.jobs.environment import mint_task_id, share_gpus
from holdfast.jobs.following import Reader, Watch
from holdfast.jobs.local.effects import effects
from holdfast.jobs.local.gpus import visible_gpus
from holdfast.jobs.local.planning import write_scripts
from holdfast.jobs.machine import Terms
from holdfast.jobs.node.bell import ring
from holdfast.jobs.node.folder import job_folder
from holdfast.jobs.node.forgetting import forget
from holdfast.jobs.node.mounts.placing import place
from holdfast.jobs.node.mounts.refusal import check, check_sources
from holdfast.jobs.node.spawning import look_after
from holdfast.jobs.node.workdir import check_workdir, put_workdir
from holdfast.jobs.place import database, state_dir
from holdfast.jobs.records import Record, Records, Spec
from holdfast.jobs.status import Status
from holdfast.jobs.task.contents import Task
from holdfast.surroundings import read_progress


class LocalEngine(engine.Engine):
    """Runs jobs on this machine.

    Args:
        state: folder of all jobs; by default that of this user.
    """

    name = "local"

    def __init__(self, state: Path | None = None) -> None:
        self._state = state or state_dir()

    # -- taking over -----------------------------------------------------------------------------------------

    @override
    def effects(self, task: Task) -> list[Effect]:
        return effects(task)

    @override
    def handover(self, task: Task) -> list[str]:
        return []

    @override
    def check(self, task: Task) -> None:
        check_workdir(task)
        check(task, self._state)

    @override
    def submit(self, task: Task) -> Job:
        self.check(task)
        check_sources(task)
        now_s = time.time()
        spec = _spec(task)
        terms = Terms(task.num_nodes, task.recovery.max_restarts, task.recovery.free_codes)
        with self._records() as records:
            number = records.reserve(task.name, spec, terms, now_s)
            folder = job_folder(self._state, number)
            try:
                write_scripts(task, folder, _base_environment())
                put_workdir(task, folder)
                place(task, folder, self._state)
            except HoldfastError:
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
            except (OSError, shutil.Error) as error:
                shutil.rmtree(folder.path, ignore_errors=True)
                raise RetryLater(
                    f"The job could not be put together in {folder.path}: {error}. Nothing was started."
                ) from error
            records.complete(number, mint_task_id(task.name, number, now_s))
            self._look_after(number)
            return self._job(records.get(number))

    def _look_after(self, number: int) -> None:
        """Start a controller, unless there is one."""
        look_after(job_folder(self._state, number))

    # -- seeing ----------------------------------------------------------------------------------------------

    @override
    def jobs(self) -> list[Job]:
        with self._records() as records:
            found = records.all(self.name)
        for record in found:
            self._tend(record)
        return [self._job(record) for record in found]

    @override
    def job(self, number: int) -> Job:
        return self._job(self._record(number))

    def _record(self, number: int) -> Record:
        with self._records() as records:
            record = records.get(number)
        self._tend(record)
        return record

    def _tend(self, record: Record) -> None:
        """See that somebody looks after a job that has not ended."""
        if not record.life.status.is_final:
            self._look_after(record.id)

    def _job(self, record: Record) -> Job:
        steps = read_progress(job_folder(self._state, record.id).progress)
        return Job.of(record, step=max(steps.values(), default=None))

    # -- asking ----------------------------------------------------------------------------------------------

    @override
    def cancel(self, number: int) -> Job:
        return self._ask(number, "cancel")

    @override
    def preempt(self, number: int, *, lead_s: float) -> Job:
        record = self._record(number)
        status = record.life.status
        if status is Status.WINDING_DOWN or not (status.is_final or record.life.is_active):
            raise Conflict(
                f"Job {number} is {record.life.status.value} and has no process that could be preempted now. "
                "It was left as it is."
            )
        return self._ask(number, "preempt", lead_s)

    @override
    def forget(self, number: int, *, force: bool = False) -> None:
        with self._records() as records:
            forget(records, self._state, number, force=force)

    def _ask(self, number: int, kind: str, lead_s: float | None = None) -> Job:
        with self._records() as records:
            record = records.get(number)
            if record.life.status.is_final:
                raise Conflict(f"Job {number} has ended already: {record.life.status.value}.")
            records.ask(number, kind, lead_s)
        ring(job_folder(self._state, number).bell)
        self._tend(record)
        return self._job(record)

    # -- output ----------------------------------------------------------------------------------------------

    @override
    def lines(self, number: int, *, follow: bool, with_changes: bool = False) -> Iterator[Line]:
        record = self._record(number)
        folder = job_folder(self._state, number)
        readers: dict[int | None, Reader] = {None: Reader(folder.changed)} if with_changes else {}
        readers.update({rank: Reader(folder.log(rank)) for rank in range(record.spec.num_nodes)})
        with contextlib.ExitStack() as stack:
            for reader in readers.values():
                stack.callback(reader.close)
            watch = Watch(folder.path, folder.logs)
            stack.callback(watch.close)
            is_end = not follow
            while True:
                is_end = is_end or self._has_ended(number)  # asked before the last of it is read
                for node, reader in readers.items():
                    yield from (Line(node, text) for text in reader.lines(is_end=is_end))
                if is_end:
                    return
                watch.wait()

    def _has_ended(self, number: int) -> bool:
        return self._record(number).life.status.is_final

    def log_paths(self, number: int) -> list[Path]:
        """The files that hold a job's output, by node.

        Raises:
            NotFound: no such job.
        """
        record = self._record(number)
        return [job_folder(self._state, number).log(rank) for rank in range(record.spec.num_nodes)]

    def _records(self) -> Records:
        return Records(database(self._state))


def _spec(task: Task) -> Spec:
    wanted = task.accelerators.num_per_node
    return Spec(
        num_nodes=task.num_nodes,
        num_gpus=wanted,
        has_setup=bool(task.setup),
        user=getpass.getuser(),
        gpus=share_gpus(visible_gpus(), wanted, task.num_nodes),
    )


def _base_environment() -> dict[str, str]:
    """The environment of whoever launches the job, without what an outer job has put there."""
    ours = ("HOLDFAST_NODE", "HOLDFAST_JOB", "HOLDFAST_ATTEMPT", "HOLDFAST_PROGRESS")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("SKYPILOT_")
    }
