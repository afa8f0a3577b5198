"""The engine of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from holdfast.errors import HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.jobs.engine import Job, UnsupportedKey, each
from holdfast.jobs.environment import JobPipeline, create_task_id
from holdfast.jobs.failure_cause import max_same
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.journal import write_document
from holdfast.jobs.local.claims import Claims, fixed_ports, lead_on, may_need_claim, needs_port, read_claims
from holdfast.jobs.local.controller import cancel_without_controller
from holdfast.jobs.node.containers.image_spec import make_image_spec, write_image_spec
from holdfast.jobs.node.containers.lease import release_containers
from holdfast.jobs.node.containers.runtime import find_runtime
from holdfast.jobs.node.job_secrets import remove_secrets_of_ended
from holdfast.jobs.node.mounts.validation import validate, validate_sources
from holdfast.jobs.node.preparation import prepare
from holdfast.jobs.node.roles import rouse_controller, start_controller
from holdfast.jobs.node.workdir import check_workdir
from holdfast.jobs.node_spec import Environment
from holdfast.jobs.notifications import write_plan
from holdfast.jobs.record_files import JobSpec, Submission
from holdfast.jobs.recorded import RecordedEngine, check_active, no_process
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.state_machine import RestartPolicy
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.image import docker_image, in_image
from holdfast.jobs.task.model import Task, TaskFile
from holdfast.jobs.timers import is_of_earlier_boot
from holdfast.jobs.unsupported_keys import CHOICE_KEYS, IMAGE, UNUSED_KEYS, find_on_machines
from holdfast.system.environment import NOTIFY, NOTIFY_ON
from holdfast.system.units import plural

_HAS_NODES = frozenset({JobStatus.STARTING, JobStatus.RUNNING})
_RESTARTED = "this machine was restarted"
_DEVICES = Path("/dev")
_CHOICE = "ignored: there is no choice of machines; kept for other engines"
_ALTERNATIVES = (
    "no choice of machines; SKYPILOT_NUM_GPUS_PER_NODE is the greatest number of GPUs in any of them"
)
_KEPT_FREE = "not given to other jobs, and not limited"
_UNSUPPORTED_KEYS: Mapping[str, str] = {
    **UNUSED_KEYS,
    **dict.fromkeys(CHOICE_KEYS, _CHOICE),
    **dict.fromkeys(("resources.any_of", "resources.ordered"), _ALTERNATIVES),
    "config": "settings of clouds and clusters; kept for other engines",
    "resources.infra": _CHOICE,
    "resources.cpus": f"{_KEPT_FREE}; more than this machine has means all of them",
    "resources.memory": f"{_KEPT_FREE}; more than this machine has means all of it",
    "resources.accelerators": "any GPUs of this machine, whatever their model; none if it has none",
    "resources.use_spot": "nothing is bought; `holdfast preempt` simulates a preemption",
    "resources.job_recovery.strategy": "ignored: there is only one machine",
    "resources.network_tier": "nodes communicate over the loopback interface",
    "resources.labels": "no machine is labelled",
    IMAGE: "commands run on this machine as it is; images (docker:NAME) need podman or docker",
    "resources.autostop": "this machine is not stopped",
    "resources.priority_class": "ignored: use priority",
}


class LocalEngine(RecordedEngine):
    """Engine that runs jobs on this machine. See `RecordedEngine` for its arguments."""

    name = "local"
    can_notify = True
    is_here = True

    # -- submission ------------------------------------------------------------------------------------------

    @override
    def unsupported_keys(self, task: Task) -> list[UnsupportedKey]:
        return unsupported_keys(_in_image(task))

    @override
    def render(self, task: Task) -> list[str]:
        return []

    @override
    def check(self, task: Task) -> None:
        _check_gpus(task, visible_gpus())
        check_workdir(task)
        validate(_in_image(task), self._state)

    @override
    def submit(self, task: Task) -> Job:
        (job,) = self.submit_file(TaskFile(task.name, (task,), task.path))
        return job

    @override
    def submit_file(self, file: TaskFile) -> list[Job]:
        self.check_file(file)
        file = dataclasses.replace(file, tasks=tuple(_in_image(task) for task in file.tasks))
        for task in file.tasks:
            validate_sources(task, self._state)
        records = self._records()
        folders: list[JobFolder] = []  # created just now, so they may be removed
        try:
            for _ in file.tasks:
                folders.append(job_folder(self._state, records.reserve()))  # noqa: PERF401 - each to be removed
            submissions = self._submissions(file, [int(folder.path.name) for folder in folders])
            first, task_ids = submissions[0].number, tuple(one.task_id for one in submissions)
            pipeline = JobPipeline(first, task_ids) if file.is_pipeline else None
            for task, folder, one in zip(file.tasks, folders, submissions, strict=True):
                self._prepare(task, folder, records, pipeline)
                _write_image(task, folder, one.task_id)
                write_plan(folder, task.subscription, one)
        except BaseException:
            for folder in folders:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        records.complete_all(submissions)
        start_controller(folders[0])
        return self._current([records.get(one.number) for one in submissions])

    def _submissions(self, file: TaskFile, numbers: list[int]) -> list[Submission]:
        """Return the submissions to record, one per task."""
        now_s = time.time()
        found: list[Submission] = []
        for position, (task, number) in enumerate(zip(file.tasks, numbers, strict=True)):
            policy = RestartPolicy(
                task.num_nodes,
                task.recovery.max_restarts,
                task.recovery.free_codes,
                max_same=max_same(task.envs),
            )
            name = f"{file.name}_{task.name}" if file.is_pipeline else task.name
            task_id = create_task_id(name, numbers[0], now_s, position)
            spec = _spec(task, numbers[position - 1] if position else None)
            found.append(Submission(number, task.name, task_id, self.name, spec, policy, now_s))
        return found

    def _prepare(self, task: Task, folder: JobFolder, records: Records, pipeline: JobPipeline | None) -> None:
        """Write all files that a job needs.

        Raises:
            HoldfastError: a file cannot be written, or would be wrong.
        """
        try:
            prepare(task, folder, records, self._state)
            variables = {**task.envs, **task.secrets}
            write_document(folder.environment, Environment(_base_environment(), variables, pipeline))
        except HoldfastError:
            raise  # some of them are an OSError too
        except (OSError, shutil.Error) as error:
            raise RetryLater(
                f"Cannot prepare the job in {folder.path}: {error}. Nothing was started."
            ) from error

    # -- status ----------------------------------------------------------------------------------------------

    @override
    def _current(self, records: list[JobRecord]) -> list[Job]:
        claims = self._claims(records)
        for record in records:
            self._ensure_controller(record, claims)
        return [self._job(record, claims) for record in records]

    def _claims(self, records: list[JobRecord]) -> Claims:
        """Return the claims of all jobs, if one of some jobs waits for its own."""
        is_needed = any(may_need_claim(record) for record in records)
        return read_claims(self._records(), self._state) if is_needed else Claims()

    @override
    def _record(self, number: int) -> JobRecord:
        record = super()._record(number)
        self._ensure_controller(record, self._claims([record]))
        return record

    def _ensure_controller(self, record: JobRecord, claims: Claims) -> None:
        """Start or wake the controller of a job that has not ended.

        One that waits behind another job needs none yet: in a pipeline, or for a claim. The end of a job that
        has ended is completed.
        """
        self._announce(record, record.job_state)
        if record.job_state.status.is_final:
            release_containers(job_folder(self._state, record.id))
            remove_secrets_of_ended(job_folder(self._state, record.id))
            return
        is_behind = claims.shortage(record.id) and record.id not in claims.leading
        if is_behind or self._is_far_from_start(record):
            return
        rouse_controller(job_folder(self._state, record.id))

    def _is_far_from_start(self, record: JobRecord) -> bool:
        """Return True if the job before this one in its pipeline has not started either."""
        if record.spec.after is None or record.job_state.status is not JobStatus.PENDING:
            return False
        try:
            before = self._records().get(record.spec.after)
        except NotFound:  # the pipeline is being launched, or that was interrupted
            return True
        self._ensure_controller(before, self._claims([before]))
        return before.job_state.status is JobStatus.PENDING

    def _job(self, record: JobRecord, claims: Claims) -> Job:
        shortage = claims.shortage(record.id)  # now, not when its controller last looked
        job_state = dataclasses.replace(record.job_state, reason=shortage) if shortage else record.job_state
        if job_state.status in _HAS_NODES and is_of_earlier_boot(
            record.clock
        ):  # so none of its processes exists
            job_state = dataclasses.replace(job_state, status=JobStatus.RECOVERING, reason=_RESTARTED)
        return Job.of(record, step=self._newest_step(record), job_state=job_state)

    # -- requests --------------------------------------------------------------------------------------------

    @override
    def cancel(self, number: int) -> Job:
        return self._request(number, "cancel")

    @override
    def cancel_all(self, numbers: Sequence[int]) -> list[Job | HoldfastError]:
        ended = self._end_waiting(numbers)
        return list(each(lambda number: ended.get(number) or self.cancel(number), numbers))

    def _end_waiting(self, numbers: Sequence[int]) -> dict[int, Job]:
        """Cancel those jobs that wait behind others, in this process.

        They have no controller. To start one for each of hundreds would take minutes and gigabytes.
        """
        records = self._records()
        claims = read_claims(records, self._state)
        found: dict[int, Job] = {}
        for number in numbers:
            is_behind = claims.shortage(number) and number not in claims.leading
            with contextlib.suppress(HoldfastError):  # `cancel` raises it again
                if is_behind and cancel_without_controller(records, job_folder(self._state, number), number):
                    found[number] = self._job(records.get(number), Claims())
        if found:
            lead_on(records, self._state)  # one of them may just have become the first that waits
        return found

    @override
    def preempt(self, number: int, *, lead_s: float) -> Job:
        record = self._record(number)
        status = record.job_state.status
        if status is JobStatus.WINDING_DOWN or not (status.is_final or record.job_state.is_active):
            raise no_process(self._job(record, Claims()))
        return self._request(number, "preempt", lead_s)

    def _request(self, number: int, kind: str, lead_s: float | None = None) -> Job:
        records = self._records()
        record = records.get(number)
        check_active(self._job(record, Claims()))
        records.ask(number, kind, lead_s)
        rouse_controller(job_folder(self._state, number))
        return self._job(record, self._claims([record]))


def _in_image(task: Task) -> Task:
    """Return a task whose commands run in its container image, if possible.

    It has an image, and this machine a runtime. Otherwise, return the task as it is.

    Raises:
        InvalidInput: it is not the name of an image.
        Unsupported: see `find_runtime`.
    """
    image = docker_image(task)
    return task if image is None or find_runtime() is None else in_image(task, image)


def _write_image(task: Task, folder: JobFolder, task_id: str) -> None:
    """Write the specification of the job's containers, if it has an image."""
    runtime = find_runtime() if task.image is not None else None
    if task.image is not None and runtime is not None:
        has_gpus = task.accelerators.num_per_node > 0 and bool(visible_gpus())
        spec = make_image_spec(folder, runtime, task.image, task_id, has_gpus=has_gpus)
        write_image_spec(folder.image, spec)


def _spec(task: Task, after: int | None) -> JobSpec:
    commands = f"{task.setup}\n{task.run}"
    return JobSpec(
        num_nodes=task.num_nodes,
        num_gpus=task.accelerators.num_per_node,
        has_setup=bool(task.setup),
        user=getpass.getuser(),
        after=after,
        devices=tuple(visible_gpus()),
        cpus=task.cpus,
        memory_mib=task.memory_mib,
        priority=task.priority,
        ports=fixed_ports(commands, {**task.envs, **task.secrets}),
        needs_port=needs_port(commands, task.num_nodes),
    )


def _check_gpus(task: Task, devices: list[str]) -> None:
    """Check that a task does not ask for more GPUs than this machine has. One without GPUs divides none.

    Raises:
        Unsupported: it does.
    """
    wanted = task.num_nodes * task.accelerators.num_per_node
    if devices and wanted > len(devices):
        nodes = f" on {task.num_nodes} nodes" if task.num_nodes > 1 else ""
        line = task.lines.get("resources.accelerators")  # 0 for an option of the command line
        where = f"{task.path}:{line}: resources.accelerators" if line else "resources.accelerators"
        raise Unsupported(
            f"{where}: expected at most {plural(len(devices), 'GPU')}, as many as this machine has or "
            f"CUDA_VISIBLE_DEVICES names, found {wanted}{nodes}. Ask for fewer with --gpus NAME:N or "
            "--num-nodes N, or use another engine with --on. Nothing was started."
        )


def _base_environment() -> dict[str, str]:
    """Return the user's environment, without variables of an outer job."""
    ours = ("HOLDFAST_NODE", "HOLDFAST_JOB", "HOLDFAST_ATTEMPT", "HOLDFAST_PROGRESS", NOTIFY, NOTIFY_ON)
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("SKYPILOT_")
    }


def visible_gpus(devices: Path = _DEVICES) -> list[str]:
    """Return the numbers or ids of the GPUs that a job may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [word.strip() for word in chosen.split(",") if word.strip()]
    numbers = [
        found[1] for path in devices.glob("nvidia*") if (found := re.fullmatch(r"nvidia(\d+)", path.name))
    ]
    return sorted(numbers, key=int)


def unsupported_keys(task: Task) -> list[UnsupportedKey]:
    """Return the keys of a task that this engine ignores or changes, in file order."""
    return find_on_machines(task, _UNSUPPORTED_KEYS, bucket="a folder of this machine")
