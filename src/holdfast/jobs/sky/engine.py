"""The engine of the user's own SkyPilot."""

from __future__ import annotations

import dataclasses
import getpass
import time
from collections import deque
from collections.abc import Iterator

from typing_extensions import override

from holdfast.errors import Conflict, HoldfastError, RetryLater, Unsupported
from holdfast.jobs.engine import Job, UnsupportedKey
from holdfast.jobs.environment import create_task_id
from holdfast.jobs.folder import job_folder
from holdfast.jobs.node.workdir import check_workdir
from holdfast.jobs.output.block import OutputBlock, OutputSelection
from holdfast.jobs.record_files import JobSpec, Submission
from holdfast.jobs.recorded import RecordedEngine, check_active
from holdfast.jobs.records import JobRecord
from holdfast.jobs.sky import commands
from holdfast.jobs.sky.commands import ManagedJob
from holdfast.jobs.sky.document import managed_name, render_document
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.task.model import FileMount, MountMode, Task
from holdfast.jobs.timers import Timers
from holdfast.jobs.unsupported_keys import value_at
from holdfast.system.linux.files import write_atomic
from holdfast.system.log import get_logger

_log = get_logger("jobs")
_RECOVERY = "status 75 is added to recover_on_exit_codes: training has saved and wants to be restarted"
_HOOK = "a hook is added that forwards preemption events to the training (Kubernetes, first node)"
_NOT_DURABLE = (
    "files reach the bucket some time after they were written, and are lost if the machine is preempted "
    "before that; give the bucket's URL to the training as its home instead"
)


class SkyEngine(RecordedEngine):
    """Engine that runs jobs wherever the user's SkyPilot does. See `RecordedEngine` for its arguments."""

    name = "sky"
    no_pipelines = "SkyPilot runs them itself: `sky jobs launch FILE`."

    # -- submission ------------------------------------------------------------------------------------------

    @override
    def unsupported_keys(self, task: Task) -> list[UnsupportedKey]:
        return unsupported_keys(task)

    @override
    def render(self, task: Task) -> list[str]:
        # the file for `sky`
        words = commands.launch_words(managed_name(task.name, "JOB"), "task.yaml", task.secrets)
        return [f"$ sky {' '.join(words)}", *render_document(task, "TASK-ID", "JOB").splitlines()]

    @override
    def check(self, task: Task) -> None:
        check_workdir(task)

    @override
    def submit(self, task: Task) -> Job:
        self.check(task)
        _log.info("submitting the job to %s; this may take minutes", commands.version())
        now_s = time.time()
        spec = JobSpec(task.num_nodes, task.accelerators.num_per_node, bool(task.setup), getpass.getuser())
        policy = RestartPolicy(task.num_nodes, task.recovery.max_restarts, task.recovery.free_codes)
        records = self._records()
        number = records.reserve()
        task_id = create_task_id(task.name, number, now_s)
        path = job_folder(self._state, number).path / "task.yaml"
        try:
            write_atomic(path, render_document(task, task_id, str(number)))
        except OSError as error:
            raise RetryLater(f"Cannot write {path}: {error}. Nothing was started.") from error
        # Before SkyPilot has it: a running job must be recorded, even if this process dies.
        records.complete(Submission(number, task.name, task_id, self.name, spec, policy, now_s))
        try:
            engine_job_id = commands.launch(managed_name(task.name, str(number)), path, task.secrets)
        except HoldfastError:
            records.withdraw(number)
            raise
        if engine_job_id is not None:
            records.set_engine_job_id(number, engine_job_id)
        return self.job(number)

    # -- status ----------------------------------------------------------------------------------------------

    @override
    def _current(self, records: list[JobRecord]) -> list[Job]:
        if all(record.job_state.status.is_final for record in records):
            return [Job.of(record) for record in records]
        try:
            managed, trouble = commands.queue(), ""
        except (RetryLater, Unsupported) as error:
            managed, trouble = [], str(error)
        return [Job.of(self._now(record, managed, trouble)) for record in records]

    def _now(self, record: JobRecord, managed: list[ManagedJob], trouble: str) -> JobRecord:
        """Return a record with SkyPilot's state of the job, which is also saved."""
        if record.job_state.status.is_final:
            return record
        if trouble:
            reason = f"SkyPilot does not answer\n{trouble}"
            return dataclasses.replace(record, job_state=dataclasses.replace(record.job_state, reason=reason))
        one = _find(record, managed)
        if one is None:
            reason = f"SkyPilot does not have a job named {managed_name(record.name, str(record.id))!r}"
            return dataclasses.replace(record, job_state=dataclasses.replace(record.job_state, reason=reason))
        has_begun = one.started_unix_s is not None
        job_state = JobState(
            status=one.status,
            attempt=one.recoveries + 1 if has_begun else 0,
            recoveries=one.recoveries,
            reason=one.reason,
        )
        now_s = one.ended_unix_s or time.time()
        recorded = (record.job_state, record.started_unix_s, record.engine_job_id)
        if (job_state, one.started_unix_s, one.id) != recorded:
            self._records().save(
                dataclasses.replace(record, engine_job_id=one.id),
                job_state,
                Timers(),
                now_unix_s=now_s,
                step_before=None,
                started_unix_s=one.started_unix_s,
            )
        return dataclasses.replace(
            record,
            job_state=job_state,
            engine_job_id=one.id,
            started_unix_s=one.started_unix_s,
            ended_unix_s=one.ended_unix_s,
        )

    # -- requests --------------------------------------------------------------------------------------------

    @override
    def cancel(self, number: int) -> Job:
        check_active(self.job(number))
        commands.cancel(self._engine_job_id(number))
        return self.job(number)

    @override
    def preempt(self, number: int, *, lead_s: float) -> Job:
        # SkyPilot has no command for this
        engine_job_id = self._engine_job_id(number)
        raise Unsupported(
            f"Job {number} is managed job {engine_job_id} of SkyPilot, which cannot simulate preemptions. To "
            "test one, stop its machine in the cloud's console."
        )

    def _engine_job_id(self, number: int) -> str:
        engine_job_id = self._record(number).engine_job_id
        if engine_job_id is None:
            self.job(number)
            engine_job_id = self._record(number).engine_job_id
        if engine_job_id is None:
            raise Conflict(
                f"SkyPilot has not assigned an id to job {number} yet. Try again when it has started."
            )
        return engine_job_id

    @override
    def forget(self, number: int, *, force: bool = False) -> None:
        self.job(number)  # records the final state
        super().forget(number, force=force)

    # -- output ----------------------------------------------------------------------------------------------

    @override
    def output(self, number: int, what: OutputSelection) -> Iterator[OutputBlock]:
        # SkyPilot itself puts the nodes' names before their lines
        if what.node or (what.follow and what.tail is not None):
            options = "--node" if what.node else "--tail with --follow"
            raise Unsupported(f"{options} is not supported for jobs on SkyPilot. Nothing was read.")
        lines = commands.logs(self._engine_job_id(number), follow=what.follow)
        for text in lines if what.tail is None else deque(lines, maxlen=what.tail):
            yield OutputBlock(0, text.encode() + b"\n")


def _find(record: JobRecord, managed: list[ManagedJob]) -> ManagedJob | None:
    """Return the managed job of a record, by its id, or by name without one."""
    name = managed_name(record.name, str(record.id))
    return next(
        (
            one
            for one in managed
            if one.id == record.engine_job_id or (record.engine_job_id is None and one.name == name)
        ),
        None,
    )


def unsupported_keys(task: Task) -> list[UnsupportedKey]:
    """Return keys with a surprising meaning, and keys that Holdfast adds."""
    found = [
        UnsupportedKey(
            "resources.job_recovery", task.line_of("resources.job_recovery", "resources"), _RECOVERY
        ),
        UnsupportedKey("config.hooks", task.line_of("config.hooks", "config"), _HOOK),
        UnsupportedKey(
            "run", task.line_of("run"), "SKYPILOT_TASK_ID is Holdfast's id, the same after every recovery"
        ),
    ]
    found += [
        UnsupportedKey(f"file_mounts.{mount.target}", mount.line, _cached(mount))
        for mount in task.file_mounts
        if mount.mode is MountMode.MOUNT_CACHED
    ]
    return sorted(found, key=lambda found_key: found_key.line)


def _cached(mount: FileMount) -> str:
    chosen = value_at(mount.spec, "config.mount_cached.transfers")
    order = "" if chosen is not None else "one file is uploaded after the other (transfers: 1); "
    return order + _NOT_DURABLE
