"""The engine of this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import time

from typing_extensions import override

from holdfast.errors import HoldfastError, NotFound, RetryLater
from holdfast.jobs.engine import Job, UnsupportedKey
from holdfast.jobs.environment import Pipeline, assign_gpus, create_task_id
from holdfast.jobs.local.gpus import visible_gpus
from holdfast.jobs.local.specs import write_commands
from holdfast.jobs.local.unsupported_keys import unsupported_keys
from holdfast.jobs.node.folder import JobFolder, job_folder
from holdfast.jobs.node.mounts.mount_plan import place
from holdfast.jobs.node.mounts.validation import validate, validate_sources
from holdfast.jobs.node.spawn import start_controller
from holdfast.jobs.node.workdir import check_workdir, create_workdir
from holdfast.jobs.node.workdir_link import workdir_links
from holdfast.jobs.record_files import JobSpec, Submission
from holdfast.jobs.recorded import RecordedEngine, check_active, no_process
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.state_machine import RestartPolicy
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task, TaskFile
from holdfast.linux.wakeup_pipe import wake


class LocalEngine(RecordedEngine):
    """Engine that runs jobs on this machine. See `RecordedEngine` for its arguments."""

    name = "local"

    # -- submission ------------------------------------------------------------------------------------------

    @override
    def unsupported_keys(self, task: Task) -> list[UnsupportedKey]:
        return unsupported_keys(task)

    @override
    def render(self, task: Task) -> list[str]:
        return []

    @override
    def check(self, task: Task) -> None:
        check_workdir(task)
        validate(task, self._state)

    @override
    def submit(self, task: Task) -> Job:
        (job,) = self.submit_file(TaskFile(task.name, (task,), task.path))
        return job

    @override
    def submit_file(self, file: TaskFile) -> list[Job]:
        self.check_file(file)
        for task in file.tasks:
            validate_sources(task)
        records = self._records()
        folders: list[JobFolder] = []  # created just now, so they may be removed
        try:
            for _ in file.tasks:
                folders.append(job_folder(self._state, records.reserve()))  # noqa: PERF401 - each to be removed
            submissions = self._submissions(file, [int(folder.path.name) for folder in folders])
            first, task_ids = submissions[0].number, tuple(one.task_id for one in submissions)
            pipeline = Pipeline(first, task_ids) if file.is_pipeline else None
            for task, folder in zip(file.tasks, folders, strict=True):
                self._prepare(task, folder, records, pipeline)
        except BaseException:
            for folder in folders:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        records.complete_all(submissions)
        start_controller(folders[0])
        return [self._job(records.get(one.number)) for one in submissions]

    def _submissions(self, file: TaskFile, numbers: list[int]) -> list[Submission]:
        """Return what is recorded of each task."""
        now_s = time.time()
        found: list[Submission] = []
        for position, (task, number) in enumerate(zip(file.tasks, numbers, strict=True)):
            policy = RestartPolicy(task.num_nodes, task.recovery.max_restarts, task.recovery.free_codes)
            name = f"{file.name}_{task.name}" if file.is_pipeline else task.name
            task_id = create_task_id(name, numbers[0], now_s, position)
            spec = _spec(task, numbers[position - 1] if position else None)
            found.append(Submission(number, task.name, task_id, self.name, spec, policy, now_s))
        return found

    def _prepare(self, task: Task, folder: JobFolder, records: Records, pipeline: Pipeline | None) -> None:
        """Write all files that a job needs.

        Raises:
            HoldfastError: a file cannot be written, or would be wrong.
        """
        try:
            write_commands(task, folder, _base_environment(), pipeline)
            create_workdir(task, folder)
            place(task, folder, self._state, workdir_links(task, folder, records))
        except HoldfastError:
            raise  # some of them are an OSError too
        except (OSError, shutil.Error) as error:
            raise RetryLater(
                f"Cannot prepare the job in {folder.path}: {error}. Nothing was started."
            ) from error

    # -- status ----------------------------------------------------------------------------------------------

    @override
    def _current(self, records: list[JobRecord]) -> list[Job]:
        for record in records:
            self._ensure_controller(record)
        return [self._job(record) for record in records]

    @override
    def _record(self, number: int) -> JobRecord:
        record = super()._record(number)
        self._ensure_controller(record)
        return record

    def _ensure_controller(self, record: JobRecord) -> None:
        """Start or wake the controller of a job that has not ended.

        A job whose predecessor in a pipeline has not started needs none yet.
        """
        if self._is_far_from_start(record):
            return
        folder = job_folder(self._state, record.id)
        if not record.life.status.is_final and not start_controller(folder):
            wake(folder.bell)

    def _is_far_from_start(self, record: JobRecord) -> bool:
        """Return True if the job before this one in its pipeline has not started either."""
        if record.spec.after is None or record.life.status is not JobStatus.PENDING:
            return False
        try:
            before = self._records().get(record.spec.after)
        except NotFound:  # the pipeline is being launched, or that was interrupted
            return True
        self._ensure_controller(before)
        return before.life.status is JobStatus.PENDING

    def _job(self, record: JobRecord) -> Job:
        return Job.of(record, step=self._newest_step(record))

    # -- requests --------------------------------------------------------------------------------------------

    @override
    def cancel(self, number: int) -> Job:
        return self._request(number, "cancel")

    @override
    def preempt(self, number: int, *, lead_s: float) -> Job:
        record = self._record(number)
        status = record.life.status
        if status is JobStatus.WINDING_DOWN or not (status.is_final or record.life.is_active):
            raise no_process(self._job(record))
        return self._request(number, "preempt", lead_s)

    def _request(self, number: int, kind: str, lead_s: float | None = None) -> Job:
        records = self._records()
        record = records.get(number)
        check_active(self._job(record))
        records.ask(number, kind, lead_s)
        folder = job_folder(self._state, number)
        if not start_controller(folder):
            wake(folder.bell)
        return self._job(record)


def _spec(task: Task, after: int | None) -> JobSpec:
    wanted = task.accelerators.num_per_node
    return JobSpec(
        num_nodes=task.num_nodes,
        num_gpus=wanted,
        has_setup=bool(task.setup),
        user=getpass.getuser(),
        gpus=assign_gpus(visible_gpus(), wanted, task.num_nodes),
        after=after,
    )


def _base_environment() -> dict[str, str]:
    """Return the user's environment, without variables of an outer job."""
    ours = ("HOLDFAST_NODE", "HOLDFAST_JOB", "HOLDFAST_ATTEMPT", "HOLDFAST_PROGRESS")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("SKYPILOT_")
    }
