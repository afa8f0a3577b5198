"""The engine of Slurm clusters, its batch script, and the options of sbatch for a task."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from holdfast.errors import Conflict, HoldfastError, InvalidInput, RetryLater, Unsupported
from holdfast.jobs.engine import Job, each
from holdfast.jobs.environment import read_packaged
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.node.job_secrets import remove_secrets
from holdfast.jobs.node.mounts.mount_plan import validate
from holdfast.jobs.node.mounts.mount_records import create_links, is_private_target, link_user, remove_links
from holdfast.jobs.node.mounts.scratch import fixed_links, shared_links
from holdfast.jobs.node.virtual_environment import own_python
from holdfast.jobs.node.workdir import check_workdir
from holdfast.jobs.recorded import NodeEngine, check_active, find_on_machines, no_process
from holdfast.jobs.records import JobRecord, JobSpec, Submission
from holdfast.jobs.slurm import commands
from holdfast.jobs.slurm.commands import Queued, choose_left_out, joined
from holdfast.jobs.slurm.job_files import JobFiles, SlurmJobState
from holdfast.jobs.slurm.mounts import ClusterMounts
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task, memory_mib, parse_cpus, value_at
from holdfast.system.entry import command
from holdfast.system.linux.files import write_atomic

GRACE_S = 60  # default time before the end at which Slurm sends its notice
FURTHER = "config.slurm.sbatch_options"
"""Key of a task file for more options, which SkyPilot's parser accepts."""
CONTAINERS = frozenset({"container", "container-image"})
"""Options with which Slurm itself, or Pyxis, a plugin for it, runs a job in a container."""
NODES = frozenset({"nodelist", "nodefile"})  # options that name the nodes of a job
_SIGNAL = re.compile(r"(?:[RB]+:)?(?:SIG)?USR1@(\d+)")

Options = dict[str, str | None]  # options by name without dashes. None: the option has no value
_CHOICE = "Slurm chooses the nodes; kept for other engines"
_WAITING = frozenset(
    {
        *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
        *("SPECIAL_EXIT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"),  # Slurm requeues the job by itself
    }
)
_THERE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})


class SlurmEngine(NodeEngine):
    """Engine that runs jobs on the Slurm cluster of this login node, which shares the folder of all jobs."""

    name = "slurm"
    can_notify = True
    no_pipelines = (
        "on Slurm, each task needs a file of its own. Launch them one after the other, with `dependency: "
        "afterok:ID` in config.slurm.sbatch_options, where ID is Slurm's id of the job before."
    )
    poll_s = 2.0  # each query is one to the scheduler
    script_prefix = "trap '' USR1; "  # Slurm may signal all processes of a job, and SIGUSR1 kills most

    @override
    def _unsupported(self, task: Task) -> Iterator[tuple[str, str]]:
        bucket = "a folder beside those of the jobs"
        yield from find_on_machines(self._in_image(task), self.name, bucket=bucket)
        yield from _further_keys(task)

    @override
    def render(self, task: Task) -> list[str]:
        # the script for sbatch
        return ["$ sbatch --parsable sbatch.sh", *self._script(task, "JOB", "TASK-ID").splitlines()]

    @override
    def check(self, task: Task) -> None:
        task = self._in_image(task)
        wanted_options(task)
        check_workdir(task)
        for mount in task.file_mounts:
            target = Path(mount.target).expanduser()
            is_shared = not target.is_absolute() or target.is_relative_to(Path.home())
            if not is_shared and not mount.is_inside and not is_private_target(target):
                raise Unsupported(
                    f"{task.where(mount.key)}: on Slurm, only paths below ~ or relative to the workdir are "
                    "visible on all nodes. Choose such a path. Nothing was started."
                )
        validate(task, self._state, runs_here=False)

    @override
    def _check_place(self) -> None:
        commands.require()

    @override
    def _runs_image(self, task: Task) -> bool:
        return CONTAINERS.isdisjoint(wanted_options(task))

    @override
    def _grace_s(self, task: Task) -> float:
        return grace_s(wanted_options(task))

    @override
    def _spec(self, task: Task, after: int | None) -> JobSpec:
        options = wanted_options(task)
        exclude, is_pinned = options.get("exclude") or "", not NODES.isdisjoint(options)
        return replace(super()._spec(task, after), exclude=exclude, is_pinned=is_pinned)

    @override
    def _complete(self, task: Task, folder: JobFolder, submission: Submission) -> None:
        files, records = JobFiles(folder.path), self._records
        files.create()
        for link in shared_links(folder):  # created when the nodes have their folders, but refused now
            if (user := link_user(records, folder, link.target)) is not None:
                raise Conflict(
                    f"{task.path}: file_mounts.{link.key}: job {user} has a mount there until it "
                    "has ended, and all nodes see the same link. Choose another path, such as one "
                    "relative to the workdir."
                )
        create_links(fixed_links(folder), folder, records)
        write_atomic(files.batch_script, self._script(task, str(submission.number), submission.task_id))

    @override
    def _start(self, task: Task, submission: Submission) -> None:
        files, spec, records = self._files(submission.number), submission.spec, self._records
        partition = wanted_options(task).get("partition") or ""
        names = choose_left_out(self._state, files.batch_script, spec, partition=partition)
        try:
            slurm_id = commands.submit(
                files.batch_script, exclude=joined(names, spec.exclude) if names else ""
            )
        except HoldfastError:
            slurm_id = files.read_state().slurm_id
            if not slurm_id:  # else Slurm has it, and has started it, but sbatch did not answer
                remove_links(files)
                records.withdraw(submission.number)
                raise
        records.set_engine_job_id(submission.number, slurm_id)

    def _script(self, task: Task, number: str, task_id: str) -> str:
        files = JobFiles(self._state / "jobs" / number)
        words = command("holdfast.jobs.slurm", "controller", str(files.path), python=own_python())
        return batch_script(task, task_id, files, words)

    @override
    def _current(self, records: list[JobRecord]) -> list[Job]:
        # Slurm is queried once, for all jobs that have not ended.
        open_ids = [one.job.number for one in records if not one.state.job_state.status.is_final]
        found = each(lambda number: self._files(number).read_state(), open_ids)
        stories = dict(zip(open_ids, found, strict=True))
        ids = {
            one.job.number: story.slurm_id or one.state.engine_job_id or ""
            for one in records
            if isinstance(story := stories.get(one.job.number), SlurmJobState)
            and not story.job_state.status.is_final
        }
        try:
            queued, trouble = commands.query_queue([one for one in ids.values() if one]), ""
        except (RetryLater, Unsupported) as error:
            queued, trouble = {}, str(error)
        jobs: list[Job] = []
        for recorded in records:
            record, story = recorded, stories.get(recorded.job.number)
            if isinstance(story, HoldfastError):
                why = replace(recorded.state.job_state, reason=str(story))
                jobs.append(Job.of(recorded.with_state(job_state=why)))
                continue
            if story is not None:  # else the job had ended when it was last queried
                record = self._updated(record, story, queued.get(ids.get(record.job.number, "")), trouble)
            if record.state.job_state.status.is_final:
                self._announce(record)
                remove_secrets(self._files(record.job.number))
            jobs.append(Job.of(record, step=self._newest_step(record)))
        return jobs

    def _updated(
        self, record: JobRecord, story: SlurmJobState, queued: Queued | None, trouble: str
    ) -> JobRecord:
        """Return the record of a job with its present state, which is recorded if it is final."""
        job_state, started_s = story.job_state, story.started_unix_s
        if not job_state.status.is_final and trouble:
            job_state = replace(job_state, reason=f"Slurm does not answer\n{trouble}")
        elif not job_state.status.is_final:
            job_state = self._state_of(record, story, queued)
        if not job_state.status.is_final:
            return record.with_state(job_state=job_state, started_unix_s=started_s, ended_unix_s=None)
        ended_s = story.ended_unix_s or time.time()
        first_s = record.state.started_unix_s or started_s
        changed = record.with_state(unix_s=ended_s, job_state=job_state, started_unix_s=first_s)
        saved = self._records.save(changed)
        return saved.with_state(started_unix_s=started_s, ended_unix_s=ended_s)

    def _state_of(self, record: JobRecord, story: SlurmJobState, queued: Queued | None) -> JobState:
        """Return the state of a job whose controller has not recorded its end."""
        files = self._files(record.job.number)
        slurm_id = story.slurm_id or record.state.engine_job_id
        if not slurm_id and files.is_cancelled:  # if Slurm has it after all, its controller ends it
            return replace(story.job_state, status=JobStatus.CANCELLED, reason="cancelled")
        if not slurm_id:
            return replace(story.job_state, reason="not in Slurm's queue yet, or sbatch was interrupted")
        if queued is None:
            story = files.read_state()  # the job may have ended between the two queries
            state = commands.query_accounting(slurm_id)
            queued = None if state is None else Queued(state, "")
        return current_state(
            story.job_state,
            queued,
            is_cancelled=files.is_cancelled,
            output=str(files.output),
            missing=ClusterMounts(files, record.job.spec.num_nodes, story.uploads).missing(),
        )

    @override
    def cancel(self, number: int) -> Job:
        check_active(self.job(number))
        files = self._files(number)
        # Before Slurm is called: if the job starts in between, its controller finds this request.
        files.request("cancel", 0.0)
        slurm_id = files.read_state().slurm_id or self._records.get(number).state.engine_job_id
        if slurm_id:
            commands.cancel_waiting(slurm_id)
        return self.job(number)

    @override
    def preempt(self, number: int, *, lead_s: float) -> Job:
        job = self.job(number)
        check_active(job)
        if job.status not in (JobStatus.STARTING, JobStatus.RUNNING):
            raise no_process(job)
        self._files(number).request("preempt", lead_s)
        return job

    def _files(self, number: int) -> JobFiles:
        return JobFiles(job_folder(self._state, number).path)


def batch_script(task: Task, task_id: str, files: JobFiles, controller: Sequence[str]) -> str:
    """Return the script for sbatch. The paths of the controller's command line exist on every node."""
    ours: Options = {
        "job-name": task.name,
        "comment": task_id,
        "nodes": str(task.num_nodes),
        "ntasks-per-node": "1",
        "chdir": str(files.path),
        "output": str(files.output),
        "open-mode": "append",  # otherwise each start would truncate it
        "requeue": None,
    }
    lines = [
        f"#SBATCH --{option}" + ("" if value is None else f"={_quoted(value)}")
        for option, value in {**ours, **wanted_options(task)}.items()
    ]
    head = "\n".join(["#!/bin/bash", *lines])
    body = read_packaged("slurm/batch.sh").replace("{controller}", shlex.join(controller))
    return f"{head}\n\n{body}"


def _quoted(value: str) -> str:
    """Quote a value for sbatch, which does not support single quotes within double ones."""
    return shlex.quote(value) if any(letter.isspace() or letter in "\"'#" for letter in value) else value


def _further_keys(task: Task) -> Iterator[tuple[str, str]]:
    """Yield the keys that Slurm ignores or changes because of their values."""
    memory = value_at(task.document, "resources.memory")
    if memory is not None and memory_mib(memory) is None:
        yield "resources.memory", "not passed on: not a fixed amount"
    for key in ("resources.cpus", "resources.memory"):
        value = str(value_at(task.document, key) or "")
        if value.endswith("+"):
            yield key, f"as {value[:-1]}: Slurm allocates exactly what is requested"
    choices = task.accelerators.choices
    if len(choices) > 1:
        what = f"only the first, {choices[0][0]}: sbatch does not support alternatives of GPUs"
        yield "resources.accelerators", what
    elif choices:
        what = f"as --gres=gpu:{choices[0][0].lower()}:{int(choices[0][1])}; if the cluster calls its GPUs "
        yield "resources.accelerators", what + f"otherwise, give gres in {FURTHER}"
    infra = value_at(task.document, "resources.infra")
    if infra is not None:
        parts = str(infra).split("/")
        is_partition = parts[0].lower() == "slurm" and len(parts) == 3
        yield "resources.infra", f"the partition {parts[2]!r} of it" if is_partition else _CHOICE
    config: Any = task.document.get("config")
    for name in config if isinstance(config, Mapping) else ():
        if name != "slurm":
            yield f"config.{name}", "settings of clouds and clusters; kept for other engines"


def wanted_options(task: Task) -> Options:
    """Return the options of sbatch for a task."""
    found: Options = dict(_from_resources(task))
    found["signal"] = f"USR1@{GRACE_S}"
    further = value_at(task.document, FURTHER)
    if further is not None and not isinstance(further, Mapping):
        raise InvalidInput(
            f"{task.where(FURTHER)}: expected a map of options, found {further!r}. Nothing was started."
        )
    for name, value in (further or {}).items():
        option = str(name).replace("_", "-").lstrip("-")
        _check(task, option, value)
        if value is False:
            found.pop(option, None)
        else:
            has_no_value = value is None or value is True or value == ""  # 1 equals True, and is a value
            found[option] = None if has_no_value else str(value)
    return found


def grace_s(options: Options) -> float:
    """Return how long before its end a job is notified, in seconds."""
    match = _SIGNAL.fullmatch(options.get("signal") or "")
    return float(match[1]) if match else float(GRACE_S)


def _check(task: Task, option: str, value: Any) -> None:
    from holdfast.jobs.task.document import read_table  # slow, and only launches need it

    where = f"{task.path}:{task.line_of(f'{FURTHER}.{option}')}: {FURTHER}"
    ways = read_table("slurm/sbatch_options.yaml")
    if way := ways["ours"].get(option):
        raise InvalidInput(f"{where}: Holdfast sets --{option} itself: {way}. Nothing was started.")
    if way := ways["refused"].get(option):
        raise InvalidInput(f"{where}: --{option} is not possible here: {way}. Nothing was started.")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", option) or "\n" in str(value):
        raise InvalidInput(
            f"{where}: expected an option of sbatch and its value, found {option!r}: {value!r}."
        )
    if option == "signal" and not _SIGNAL.fullmatch(str(value)):
        raise InvalidInput(
            f"{where}: expected USR1@SECONDS, found {value!r}: SIGUSR1 is the preemption notice."
        )


def _from_resources(task: Task) -> Iterator[tuple[str, str]]:
    resources = task.document.get("resources") or {}
    cpus = parse_cpus(resources.get("cpus"))
    if cpus is not None:
        yield "cpus-per-task", str(max(1, int(cpus)))
    memory = memory_mib(resources.get("memory"))
    if memory is not None:
        yield "mem", f"{memory}M"
    if task.accelerators.choices:
        name, count = task.accelerators.choices[0]
        yield "gres", f"gpu:{name.lower()}:{max(1, int(count))}"
    partition = _partition(task, resources)
    if partition:
        yield "partition", partition


def _partition(task: Task, resources: Mapping[str, Any]) -> str | None:
    """Return the partition of `infra: slurm/CLUSTER/PARTITION`, or SkyPilot's one for CPU-only jobs."""
    parts = str(resources.get("infra") or "").split("/")
    if len(parts) == 3 and parts[0].lower() == "slurm" and parts[2] not in ("", "*"):
        return parts[2]
    named = value_at(task.document, "config.slurm.cpu_partition")
    return str(named) if named and not task.accelerators.choices else None


def current_state(
    job_state: JobState, queued: Queued | None, *, is_cancelled: bool, output: str, missing: str = ""
) -> JobState:
    """Return the current state of a job from that recorded by its controller, unless that is final."""
    if job_state.status.is_final:
        return job_state
    state = None if queued is None else queued.state
    if state in _THERE:
        status = JobStatus.STARTING if job_state.status is JobStatus.PENDING else job_state.status
        return replace(job_state, status=status)
    if queued is not None and state in _WAITING:
        if is_cancelled:
            return replace(job_state, status=JobStatus.CANCELLING, reason="cancelled")
        why = f"waits in Slurm ({queued.reason})" if queued.reason not in ("", "None") else "waits in Slurm"
        status = JobStatus.RECOVERING if job_state.attempt else JobStatus.PENDING
        return replace(job_state, status=status, reason="; ".join(filter(None, (job_state.reason, why))))
    # Slurm has ended the job before its controller could record why.
    if is_cancelled or (state or "").startswith("CANCELLED"):
        status, reason = JobStatus.CANCELLED, "cancelled" if is_cancelled else "cancelled in Slurm"
    else:
        found = "Slurm has forgotten the job" if state is None else f"Slurm reports {state}"
        cause = (
            "the job's controller did not record how it ended"
            if job_state.attempt
            else "its nodes sent no message: is the folder on a file system that they share "
            "(HOLDFAST_STATE), and Python at the same path there?"
        )
        status, reason = JobStatus.FAILED_CONTROLLER, f"{found}, and {cause} (see {output})"
    reason = "; ".join(filter(None, (reason, missing)))
    return replace(job_state, status=status, is_active=False, reason=reason)
