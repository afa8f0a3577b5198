"""The engine of the user's own SkyPilot."""

from __future__ import annotations

import copy
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS, Conflict, HoldfastError, RetryLater, Unsupported
from holdfast.jobs.engine import Job
from holdfast.jobs.environment import add_notice_file
from holdfast.jobs.folder import job_folder
from holdfast.jobs.node.workdir import check_workdir
from holdfast.jobs.output import OutputBlock, OutputSelection
from holdfast.jobs.recorded import RecordedEngine, check_active
from holdfast.jobs.records import JobRecord
from holdfast.jobs.sky import commands
from holdfast.jobs.sky.commands import ManagedJob
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.task.document import to_yaml
from holdfast.jobs.task.model import MountMode, Task, TaskFile, value_at
from holdfast.system.environment import PREEMPTION
from holdfast.system.linux.files import write_atomic
from holdfast.system.log import get_logger

_log = get_logger("jobs")
_RECOVERY = "status 75 is added to recover_on_exit_codes: training has saved and wants to be restarted"
_HOOK = "a hook is added that forwards preemption events to the training (Kubernetes, first node)"
_NOT_DURABLE = (
    "files reach the bucket some time after they were written, and are lost if the machine is preempted "
    "before that; give the bucket's URL to the training as its home instead"
)
# Variable with Holdfast's id of the job. SkyPilot creates a new one whenever its controller restarts.
TASK_ID, JOB = "HOLDFAST_TASK_ID", "HOLDFAST_JOB"
HOOK_S = 60  # time limit of a hook, during which SkyPilot keeps the machine so that training can save
_OWN_ID = f'export SKYPILOT_TASK_ID="${TASK_ID}"  # the same after every recovery\n'


class SkyEngine(RecordedEngine):
    """Engine that runs jobs wherever the user's SkyPilot does. See `RecordedEngine` for its arguments."""

    name = "sky"
    no_pipelines = "SkyPilot runs them itself: `sky jobs launch FILE`."
    poll_s = 5.0  # each query starts a process

    @override
    def _unsupported(self, task: Task) -> Iterator[tuple[str, str]]:
        yield "resources.job_recovery", _RECOVERY
        yield "config.hooks", _HOOK
        yield "run", "SKYPILOT_TASK_ID is Holdfast's id, the same after every recovery"
        for mount in task.file_mounts:
            if mount.mode is MountMode.MOUNT_CACHED:
                is_chosen = value_at(mount.spec, "config.mount_cached.transfers") is not None
                order = "" if is_chosen else "one file is uploaded after the other (transfers: 1); "
                yield mount.key, order + _NOT_DURABLE

    @override
    def render(self, task: Task) -> list[str]:
        # the file for `sky`
        words = commands.launch_words(managed_name(task.name, "JOB"), "task.yaml", task.secrets)
        return [f"$ sky {' '.join(words)}", *render_document(task, "TASK-ID", "JOB").splitlines()]

    @override
    def check(self, task: Task) -> None:
        check_workdir(task)

    @override
    def submit_file(self, file: TaskFile) -> list[Job]:
        self.check_file(file)
        task = file.only()
        _log.info("submitting the job to %s; this may take minutes", commands.version())
        number = self._records.reserve()
        (submission,) = self._submissions(file, [task], [number])
        path = job_folder(self._state, number).path / "task.yaml"
        try:
            write_atomic(path, render_document(task, submission.task_id, str(number)))
        except OSError as error:
            raise RetryLater(f"Cannot write {path}: {error}. Nothing was started.") from error
        # Before SkyPilot has it: a running job must be recorded, even if this process dies.
        self._records.complete(submission)
        try:
            engine_job_id = commands.launch(managed_name(task.name, str(number)), path, task.secrets)
        except HoldfastError:
            self._records.withdraw(number)
            raise
        if engine_job_id is not None:
            self._records.set_engine_job_id(number, engine_job_id)
        return [self.job(number)]

    @override
    def _current(self, records: list[JobRecord]) -> list[Job]:
        if all(record.state.job_state.status.is_final for record in records):
            return [Job.of(record) for record in records]
        try:
            managed, trouble = commands.queue(), ""
        except (RetryLater, Unsupported) as error:
            managed, trouble = [], str(error)
        return [Job.of(self._now(record, managed, trouble)) for record in records]

    def _now(self, record: JobRecord, managed: list[ManagedJob], trouble: str) -> JobRecord:
        if record.state.job_state.status.is_final:
            return record
        name = managed_name(record.job.name, str(record.job.number))
        known_id = record.state.engine_job_id
        found = (one for one in managed if (one.name == name if known_id is None else one.id == known_id))
        if (job := next(found, None)) is None:
            reason = f"SkyPilot does not have a job named {name!r}"
            reason = f"SkyPilot does not answer\n{trouble}" if trouble else reason
            return record.with_state(job_state=replace(record.state.job_state, reason=reason))
        job_state = JobState(
            status=job.status,
            attempt=0 if job.started_unix_s is None else job.recoveries + 1,
            recoveries=job.recoveries,
            reason=job.reason,
        )
        recorded = (record.state.job_state, record.state.started_unix_s, record.state.engine_job_id)
        if (job_state, job.started_unix_s, job.id) != recorded:
            started_s = record.state.started_unix_s or job.started_unix_s
            now_s = job.ended_unix_s or time.time()
            changes = {"job_state": job_state, "engine_job_id": job.id, "started_unix_s": started_s}
            record = self._records.save(record.with_state(unix_s=now_s, **changes))
        times = {"started_unix_s": job.started_unix_s, "ended_unix_s": job.ended_unix_s}
        return record.with_state(job_state=job_state, engine_job_id=job.id, **times)

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
        if self._records.get(number).state.engine_job_id is None:
            self.job(number)  # records it
        if (engine_job_id := self._records.get(number).state.engine_job_id) is None:
            what = f"SkyPilot has not assigned an id to job {number} yet"
            raise Conflict(f"{what}. Try again when it has started.")
        return engine_job_id

    @override
    def output(self, number: int, what: OutputSelection) -> Iterator[OutputBlock]:
        # SkyPilot itself puts the nodes' names before their lines
        if what.node or (what.follow and what.tail is not None):
            options = "--node" if what.node else "--tail with --follow"
            raise Unsupported(f"{options} is not supported for jobs on SkyPilot. Nothing was read.")
        lines = commands.logs(self._engine_job_id(number), follow=what.follow)
        for text in lines if what.tail is None else deque(lines, maxlen=what.tail):
            yield OutputBlock(0, text.encode() + b"\n")


def render_document(task: Task, task_id: str, job: str) -> str:
    """Return the file for `sky jobs launch`: the user's, and additions to save after a notice. No secrets."""
    document: dict[str, Any] = copy.deepcopy(dict(task.document))
    document["run"] = _OWN_ID + task.run
    if task.setup:
        document["setup"] = _OWN_ID + task.setup
    if task.workdir is not None:
        document["workdir"] = task.workdir
    notice = f"/tmp/holdfast-notice-{task_id}"
    document["envs"] = {
        **document.get("envs", {}),
        TASK_ID: task_id,
        JOB: job,
        PREEMPTION: add_notice_file(task.envs.get(PREEMPTION, "auto"), notice),
    }
    document["resources"] = _with_free_status(document.get("resources") or {})
    run = f"touch {notice}\nsleep {HOOK_S - 5}"  # the machine is released when the hook exits
    hook = {"run": run, "events": ["preemption"], "timeout": HOOK_S}
    config = document.get("config") or {}
    document["config"] = {**config, "hooks": [*(config.get("hooks") or []), hook]}
    if task.file_mounts:
        mounts = document["file_mounts"]
        document["file_mounts"] = {target: _one_after_the_other(spec) for target, spec in mounts.items()}
    return to_yaml(replace(task, document=document))


def managed_name(name: str, job: str) -> str:
    """Return a name for the job that SkyPilot accepts and that no other job has."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    return f"{plain if plain[:1].isalpha() else f'job-{plain}'.rstrip('-')}-{job}"


def _with_free_status(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return resources that do not count preemptions and hangs as errors, by their exit statuses."""
    asked = resources.get("job_recovery")
    recovery: dict[str, Any] = dict(asked) if isinstance(asked, Mapping) else {}
    if isinstance(asked, str):
        recovery["strategy"] = asked
    codes = recovery.get("recover_on_exit_codes")
    listed = codes if isinstance(codes, list) else [] if codes is None else [codes]
    recovery["recover_on_exit_codes"] = sorted({*listed, PREEMPTED_STATUS, HUNG_STATUS})
    return {**resources, "job_recovery": recovery}


def _one_after_the_other(spec: Any) -> Any:
    if not isinstance(spec, Mapping) or str(spec.get("mode")).upper() != MountMode.MOUNT_CACHED.value:
        return spec
    config = dict(spec.get("config") or {})
    cached = {"transfers": 1, **(config.get("mount_cached") or {})}
    return {**spec, "config": {**config, "mount_cached": cached}}
