"""The engine of this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import time

from typing_extensions import override

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.engine import Job, UnsupportedKey
from holdfast.jobs.environment import assign_gpus, create_task_id
from holdfast.jobs.local.gpus import visible_gpus
from holdfast.jobs.local.specs import write_scripts
from holdfast.jobs.local.unsupported_keys import unsupported_keys
from holdfast.jobs.node.folder import job_folder
from holdfast.jobs.node.mounts.mount_plan import place
from holdfast.jobs.node.mounts.validation import validate, validate_sources
from holdfast.jobs.node.spawn import start_controller
from holdfast.jobs.node.workdir import check_workdir, create_workdir
from holdfast.jobs.record_files import JobSpec, Submission
from holdfast.jobs.recorded import RecordedEngine, check_active, no_process
from holdfast.jobs.records import JobRecord
from holdfast.jobs.state_machine import RestartPolicy
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task
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
        self.check(task)
        validate_sources(task)
        now_s = time.time()
        spec = _spec(task)
        policy = RestartPolicy(task.num_nodes, task.recovery.max_restarts, task.recovery.free_codes)
        records = self._records()
        number = records.reserve()
        folder = job_folder(self._state, number)  # created just now, so it may be removed
        try:
            write_scripts(task, folder, _base_environment())
            create_workdir(task, folder)
            place(task, folder, self._state)
        except HoldfastError:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        except (OSError, shutil.Error) as error:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise RetryLater(
                f"Cannot prepare the job in {folder.path}: {error}. Nothing was started."
            ) from error
        task_id = create_task_id(task.name, number, now_s)
        records.complete(Submission(number, task.name, task_id, self.name, spec, policy, now_s))
        start_controller(folder)
        return self._job(records.get(number))

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
        """Start or wake the controller of a job that has not ended."""
        folder = job_folder(self._state, record.id)
        if not record.life.status.is_final and not start_controller(folder):
            wake(folder.bell)

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
        wake(job_folder(self._state, number).bell)
        self._ensure_controller(record)
        return self._job(record)


def _spec(task: Task) -> JobSpec:
    wanted = task.accelerators.num_per_node
    return JobSpec(
        num_nodes=task.num_nodes,
        num_gpus=wanted,
        has_setup=bool(task.setup),
        user=getpass.getuser(),
        gpus=assign_gpus(visible_gpus(), wanted, task.num_nodes),
    )


def _base_environment() -> dict[str, str]:
    """Return the user's environment, without variables of an outer job."""
    ours = ("HOLDFAST_NODE", "HOLDFAST_JOB", "HOLDFAST_ATTEMPT", "HOLDFAST_PROGRESS")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("SKYPILOT_")
    }
