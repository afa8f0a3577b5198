"""The engine of this machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace
from typing_extensions import override

from holdfast.errors import HoldfastError, NotFound, Unsupported
from holdfast.jobs.engine import Job, each
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.journal import write_document
from holdfast.jobs.local.claims import Claims, fixed_ports, lead_on, may_need_claim, needs_port, read_claims
from holdfast.jobs.local.controller import cancel_without_controller
from holdfast.jobs.node.containers.container import find_runtime, make_image_spec, release_containers
from holdfast.jobs.node.job_secrets import remove_secrets_of_ended
from holdfast.jobs.node.mounts.mount_plan import validate
from holdfast.jobs.node.roles import rouse_controller, start_controller
from holdfast.jobs.node.workdir import check_workdir
from holdfast.jobs.recorded import NodeEngine, check_active, find_on_machines, no_process
from holdfast.jobs.records import JobRecord, JobSpec, Submission
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task
from holdfast.jobs.timers import is_of_earlier_boot
from holdfast.system.environment import NOTIFY, NOTIFY_ON
from holdfast.system.units import plural

_HAS_NODES = frozenset({JobStatus.STARTING, JobStatus.RUNNING})
_RESTARTED = "this machine was restarted"
_DEVICES = Path("/dev")
_OF_OUTER_JOB = frozenset(
    {"HOLDFAST_NODE", "HOLDFAST_JOB", "HOLDFAST_ATTEMPT", "HOLDFAST_PROGRESS", NOTIFY, NOTIFY_ON}
)
"""Variables of a job that launches another one, which are not its own."""


class LocalEngine(NodeEngine):
    """Engine that runs jobs on this machine. See `RecordedEngine` for its arguments."""

    name = "local"
    can_notify = True
    is_here = True

    @override
    def _unsupported(self, task: Task) -> Iterator[tuple[str, str]]:
        return find_on_machines(self._in_image(task), self.name, bucket="a folder of this machine")

    @override
    def check(self, task: Task) -> None:
        _check_gpus(task, visible_gpus())
        check_workdir(task)
        validate(self._in_image(task), self._state)

    @override
    def _runs_image(self, task: Task) -> bool:
        return find_runtime() is not None

    @override
    def _spec(self, task: Task, after: int | None) -> JobSpec:
        commands = f"{task.setup}\n{task.run}"
        return replace(
            super()._spec(task, after),
            devices=tuple(visible_gpus()),
            cpus=task.cpus,
            memory_mib=task.memory_mib,
            priority=task.priority,
            ports=fixed_ports(commands, {**task.envs, **task.secrets}),
            needs_port=needs_port(commands, task.num_nodes),
        )

    @override
    def _user_variables(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if name not in _OF_OUTER_JOB and not name.startswith("SKYPILOT_")
        }

    @override
    def _complete(self, task: Task, folder: JobFolder, submission: Submission) -> None:
        if task.image is not None and (runtime := find_runtime()) is not None:
            has_gpus = task.accelerators.num_per_node > 0 and bool(visible_gpus())
            spec = make_image_spec(folder, runtime, task.image, submission.task_id, has_gpus=has_gpus)
            write_document(folder.image, spec)

    @override
    def _start(self, task: Task, submission: Submission) -> None:
        start_controller(job_folder(self._state, submission.number))

    @override
    def _current(self, records: list[JobRecord]) -> list[Job]:
        claims = self._claims(records)
        for record in records:
            self._ensure_controller(record, claims)
        return [self._job(record, claims) for record in records]

    def _claims(self, records: list[JobRecord]) -> Claims:
        """Return the claims of all jobs, if one of some jobs waits for its own."""
        is_needed = any(may_need_claim(record) for record in records)
        return read_claims(self._records, self._state) if is_needed else Claims()

    def _ensure_controller(self, record: JobRecord, claims: Claims) -> None:
        """Start or wake the controller of a job that has not ended."""
        self._announce(record)
        if record.state.job_state.status.is_final:
            release_containers(job_folder(self._state, record.job.number))
            remove_secrets_of_ended(job_folder(self._state, record.job.number))
            return
        if not (claims.is_behind(record.job.number) or self._is_far_from_start(record)):
            rouse_controller(job_folder(self._state, record.job.number))

    def _is_far_from_start(self, record: JobRecord) -> bool:
        """Return True if the job before this one in its pipeline has not started either."""
        if record.job.spec.after is None or record.state.job_state.status is not JobStatus.PENDING:
            return False
        try:
            before = self._records.get(record.job.spec.after)
        except NotFound:  # the pipeline is being launched, or that was interrupted
            return True
        self._ensure_controller(before, self._claims([before]))
        return before.state.job_state.status is JobStatus.PENDING

    def _job(self, record: JobRecord, claims: Claims) -> Job:
        shortage = claims.shortages.get(record.job.number)  # now, not when its controller last looked
        job_state = record.state.job_state
        job_state = replace(job_state, reason=shortage) if shortage else job_state
        has_nodes = job_state.status in _HAS_NODES
        if has_nodes and is_of_earlier_boot(record.state.clock):  # its processes are gone
            job_state = replace(job_state, status=JobStatus.RECOVERING, reason=_RESTARTED)
        return Job.of(record.with_state(job_state=job_state), step=self._newest_step(record))

    @override
    def cancel(self, number: int) -> Job:
        return self._request(number, "cancel")

    @override
    def cancel_all(self, numbers: Sequence[int]) -> list[Job | HoldfastError]:
        ended = self._end_waiting(numbers)
        return list(each(lambda number: ended.get(number) or self.cancel(number), numbers))

    def _end_waiting(self, numbers: Sequence[int]) -> dict[int, Job]:
        """Cancel those jobs that wait behind others, in this process."""
        # They have no controller. To start one for each of hundreds would take minutes and gigabytes.
        records = self._records
        claims = read_claims(records, self._state)
        found: dict[int, Job] = {}
        for number in filter(claims.is_behind, numbers):
            with contextlib.suppress(HoldfastError):  # `cancel` raises it again
                if cancel_without_controller(records, job_folder(self._state, number), number):
                    found[number] = self._job(records.get(number), Claims())
        if found:
            lead_on(records, self._state)  # one of them may just have become the first that waits
        return found

    @override
    def preempt(self, number: int, *, lead_s: float) -> Job:
        record = self._records.get(number)
        status = record.state.job_state.status
        if status is JobStatus.WINDING_DOWN or not (status.is_final or record.state.job_state.is_active):
            raise no_process(self._job(record, Claims()))
        return self._request(number, "preempt", lead_s)

    def _request(self, number: int, kind: str, lead_s: float | None = None) -> Job:
        record = self._records.get(number)
        check_active(self._job(record, Claims()))
        self._records.ask(number, kind, lead_s)
        rouse_controller(job_folder(self._state, number))
        return self._job(record, self._claims([record]))


def _check_gpus(task: Task, devices: list[str]) -> None:
    """Check that a task does not ask for more GPUs than this machine has. One without GPUs divides none."""
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


def visible_gpus(devices: Path = _DEVICES) -> list[str]:
    """Return the numbers or ids of the GPUs that a job may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [word.strip() for word in chosen.split(",") if word.strip()]
    numbers = [
        found[1] for path in devices.glob("nvidia*") if (found := re.fullmatch(r"nvidia(\d+)", path.name))
    ]
    return sorted(numbers, key=int)
