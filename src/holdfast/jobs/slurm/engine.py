"""The engine of Slurm clusters."""

from __future__ import annotations

import dataclasses
import getpass
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import Conflict, HoldfastError, RetryLater, Unsupported
from holdfast.jobs.engine import Job, UnsupportedKey, each
from holdfast.jobs.environment import create_task_id
from holdfast.jobs.failure_cause import max_same
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.node.mounts.private_links import is_private_target
from holdfast.jobs.node.mounts.scratch import fixed_links, shared_links
from holdfast.jobs.node.mounts.symlinks import create_links, is_link_used, link_user, remove_links
from holdfast.jobs.node.mounts.validation import validate, validate_sources
from holdfast.jobs.node.parent_python import own_python
from holdfast.jobs.node.preparation import prepare
from holdfast.jobs.node.workdir import check_workdir
from holdfast.jobs.notifications import write_plan
from holdfast.jobs.record_files import JobSpec, Submission
from holdfast.jobs.recorded import RecordedEngine, check_active, no_process
from holdfast.jobs.records import JobRecord
from holdfast.jobs.slurm import commands
from holdfast.jobs.slurm.cluster_mounts import ClusterMounts
from holdfast.jobs.slurm.commands import Queued, current_state
from holdfast.jobs.slurm.job_files import JobFiles, SlurmJobState, SubmittedJob
from holdfast.jobs.slurm.left_out import choose_left_out, joined
from holdfast.jobs.slurm.options import (
    FURTHER,
    Options,
    grace_s,
    has_own_container,
    is_pinned,
    wanted_options,
)
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.amounts import memory_mib
from holdfast.jobs.task.image import docker_image, in_image
from holdfast.jobs.task.model import Task
from holdfast.jobs.timers import Timers
from holdfast.jobs.unsupported_keys import CHOICE_KEYS, IMAGE, UNUSED_KEYS, find_on_machines, value_at
from holdfast.system.entry import command
from holdfast.system.linux.files import write_atomic

_POLL_S = 2.0
"""Interval for following output, as writes on other machines do not wake this one."""
_DEAF_TO_USR1 = "trap '' USR1; "
"""Prefix of scripts: Slurm may signal all processes of a job, and SIGUSR1 kills most."""
_BODY = """\
# Slurm may signal this shell only. A shell runs a trap only while it waits, never while a child
# runs in its foreground.
told= controller=
trap 'told=USR1; kill -USR1 "$controller" 2>/dev/null' USR1
trap 'told=TERM; kill -TERM "$controller" 2>/dev/null' TERM
{controller} &
controller=$!
if [ -n "$told" ]; then kill "-$told" "$controller"; fi
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; done
wait "$controller"
status=$?
# The controller was killed, and could not requeue the job. A cancelled job stays cancelled.
if [ "$status" -gt 128 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
_CHOICE = "Slurm chooses the nodes; kept for other engines"
_UNSUPPORTED_KEYS: Mapping[str, str] = {
    **UNUSED_KEYS,
    **dict.fromkeys(CHOICE_KEYS, _CHOICE),
    "resources.use_spot": "Slurm has no spot machines; choose a preemptible partition, "
    f"as infra: slurm/CLUSTER/PARTITION or in {FURTHER}",
    "resources.job_recovery.strategy": "Slurm's queue chooses the nodes",
    "resources.network_tier": "the cluster's network as it is",
    "resources.labels": "no machine is labelled",
    IMAGE: "commands run on the nodes as they are; images (docker:NAME) need podman or docker "
    f"on the nodes, others an option of your cluster in {FURTHER}",
    "resources.autostop": "no machine is stopped",
    "resources.priority": f"not passed on; use sbatch's own option, see {FURTHER}",
    "resources.priority_class": f"not passed on; use sbatch's own option, see {FURTHER}",
}


class SlurmEngine(RecordedEngine):
    """Engine that runs jobs on the Slurm cluster of this login node.

    Args:
        state: folder of all jobs, on a file system that all nodes share. Default: that of this user.
    """

    name = "slurm"
    can_notify = True
    no_pipelines = (
        "on Slurm, each task needs a file of its own. Launch them one after the other, with `dependency: "
        "afterok:ID` in config.slurm.sbatch_options, where ID is Slurm's id of the job before."
    )
    poll_s = 2.0  # writes on other machines do not wake this one

    # -- submission ------------------------------------------------------------------------------------------

    @override
    def unsupported_keys(self, task: Task) -> list[UnsupportedKey]:
        return unsupported_keys(_in_image(task))

    @override
    def render(self, task: Task) -> list[str]:
        # the script for sbatch
        script = self._script(task, "JOB", "TASK-ID")
        return ["$ sbatch --parsable sbatch.sh", *script.text().splitlines()]

    @override
    def check(self, task: Task) -> None:
        task = _in_image(task)
        wanted_options(task)
        check_workdir(task)
        for mount in task.file_mounts:
            where = f"{task.path}:{mount.line}: file_mounts.{mount.target}"
            target = Path(mount.target).expanduser()
            is_shared = not target.is_absolute() or target.is_relative_to(Path.home())
            if not is_shared and not mount.is_inside and not is_private_target(target):
                raise Unsupported(
                    f"{where}: on Slurm, only paths below ~ or relative to the workdir are visible on "
                    "all nodes. Choose such a path. Nothing was started."
                )
        validate(task, self._state, runs_here=False)

    @override
    def submit(self, task: Task) -> Job:
        self.check(task)
        task = _in_image(task)
        commands.require()
        validate_sources(task, self._state)
        now_s = time.time()
        spec = JobSpec(task.num_nodes, task.accelerators.num_per_node, bool(task.setup), getpass.getuser())
        policy = _policy(task)
        records = self._records()
        number = records.reserve()
        task_id = create_task_id(task.name, number, now_s)
        files = self._files(number)  # in a folder created just now, so it may be removed
        submission = Submission(number, task.name, task_id, self.name, spec, policy, now_s)
        try:
            self._put_together(task, number, task_id, spec, policy)
            write_plan(files.job, task.subscription, submission)
        except HoldfastError:
            shutil.rmtree(files.job.path, ignore_errors=True)
            raise
        except (OSError, shutil.Error) as error:
            shutil.rmtree(files.job.path, ignore_errors=True)
            raise RetryLater(
                f"Cannot prepare the job in {files.job.path}: {error}. Nothing was started."
            ) from error
        # Before Slurm has it: a running job must be recorded, even if this process dies.
        records.complete(submission)
        try:
            slurm_id = commands.submit(files.script, exclude=self._excluded(task, files.script))
        except HoldfastError:
            slurm_id = files.read_state().slurm_id
            if not slurm_id:  # else Slurm has it, and has started it, but sbatch did not answer
                remove_links(files.job)
                records.withdraw(number)
                raise
        records.set_engine_job_id(number, slurm_id)
        return self.job(number)

    def _put_together(
        self, task: Task, number: int, task_id: str, spec: JobSpec, policy: RestartPolicy
    ) -> None:
        """Write all files that the job needs on its nodes."""
        files = self._files(number)
        folder = files.job
        records = self._records()
        prepare(task, folder, records, self._state, prefix=_DEAF_TO_USR1)
        files.write_job(
            SubmittedJob(
                number=number,
                name=task.name,
                task_id=task_id,
                num_nodes=spec.num_nodes,
                num_gpus=spec.num_gpus,
                has_setup=spec.has_setup,
                user=spec.user,
                terms=policy,
                task_environment={**task.envs, **task.secrets},
                image=task.image or "",
                exclude=wanted_options(task).get("exclude") or "",
                is_pinned=is_pinned(wanted_options(task)),
            )
        )
        for link in shared_links(folder):  # created when the nodes have their folders, but refused now
            if (user := link_user(records, folder, link.target)) is not None:
                raise Conflict(
                    f"{task.path}: file_mounts.{link.key}: job {user} has a mount there until it "
                    "has ended, and all nodes see the same link. Choose another path, such as one "
                    "relative to the workdir."
                )
        create_links(
            fixed_links(folder),
            is_in_use=lambda target: is_link_used(records, folder, target),
            is_of_job=lambda path: path.is_relative_to(self._state),
        )
        write_atomic(files.script, self._script(task, str(number), task_id).text())

    def _script(self, task: Task, number: str, task_id: str) -> Script:
        folder = self._state / "jobs" / number
        output = JobFiles(JobFolder(folder)).output
        options = wanted_options(task)
        controller = tuple(command("holdfast.jobs.slurm", "controller", str(folder), python=own_python()))
        return Script(task.name, task_id, task.num_nodes, options, controller, str(folder), str(output))

    def _excluded(self, task: Task, script: Path) -> str:
        """Return the nodes that a job leaves out: those of its user, and those that stand out; or nothing."""
        options = wanted_options(task)
        names = choose_left_out(
            self._state,
            script,
            task.num_nodes,
            partition=options.get("partition") or "",
            unwanted=options.get("exclude") or "",
            is_pinned=is_pinned(options),
        )
        return joined(names, options.get("exclude") or "") if names else ""

    # -- status ----------------------------------------------------------------------------------------------

    @override
    def _current(self, records: list[JobRecord]) -> list[Job]:
        # Slurm is queried once, for all jobs that have not ended.
        found = [one for one in records if not one.job_state.status.is_final]
        results = zip(found, each(lambda one: self._files(one.id).read_state(), found), strict=True)
        read = {one.id: result for one, result in results}
        stories = {number: one for number, one in read.items() if not isinstance(one, HoldfastError)}
        broken = {number: str(one) for number, one in read.items() if isinstance(one, HoldfastError)}
        outer = {one.id: stories[one.id].slurm_id or one.engine_job_id for one in found if one.id in stories}
        open_ids = [
            slurm_id
            for number, slurm_id in outer.items()
            if slurm_id and not stories[number].job_state.status.is_final
        ]
        try:
            queued, trouble = commands.query_queue(open_ids), ""
        except (RetryLater, Unsupported) as error:
            queued, trouble = {}, str(error)
        return [
            Job.of(one, job_state=dataclasses.replace(one.job_state, reason=broken[one.id]))
            if one.id in broken
            else self._job(one, stories.get(one.id), queued.get(outer.get(one.id) or ""), trouble)
            for one in records
        ]

    def _job(
        self, record: JobRecord, story: SlurmJobState | None, queued: Queued | None, trouble: str
    ) -> Job:
        if story is None:  # the job had ended when it was last queried
            self._announce(record, record.job_state)
            self._files(record.id).remove_secrets()
            return Job.of(record, step=self._newest_step(record))
        job_state = self._life(record, story, queued, trouble)
        if job_state.status.is_final:
            ended_s = story.ended_unix_s or time.time()
            record = self._records().save(
                record,
                job_state,
                Timers(),
                now_unix_s=ended_s,
                step_before=None,
                started_unix_s=story.started_unix_s,
            )
            self._announce(record, job_state)
            self._files(record.id).remove_secrets()
        record = dataclasses.replace(
            record,
            started_unix_s=story.started_unix_s,
            ended_unix_s=(story.ended_unix_s or time.time()) if job_state.status.is_final else None,
        )
        return Job.of(record, step=self._newest_step(record), job_state=job_state)

    def _life(self, record: JobRecord, story: SlurmJobState, queued: Queued | None, trouble: str) -> JobState:
        job_state = story.job_state
        if job_state.status.is_final:
            return job_state
        if trouble:
            return dataclasses.replace(job_state, reason=f"Slurm does not answer\n{trouble}")
        files = self._files(record.id)
        slurm_id = story.slurm_id or record.engine_job_id
        if not slurm_id:
            if any(one.kind == "cancel" for one in files.requests()):
                # If Slurm has it after all, its controller ends it when it starts.
                return dataclasses.replace(job_state, status=JobStatus.CANCELLED, reason="cancelled")
            return dataclasses.replace(
                job_state, reason="not in Slurm's queue yet, or sbatch was interrupted"
            )
        if queued is None:
            story = files.read_state()  # the job may have ended between the two queries
            state = commands.query_accounting(slurm_id)
            job_state, queued = story.job_state, None if state is None else Queued(state, "")
        is_cancelled = any(one.kind == "cancel" for one in files.requests())
        missing = ClusterMounts(files.job, record.spec.num_nodes, story.uploads).left()
        return current_state(
            job_state, queued, is_cancelled=is_cancelled, output=str(files.output), missing=missing
        )

    # -- requests --------------------------------------------------------------------------------------------

    @override
    def cancel(self, number: int) -> Job:
        check_active(self.job(number))
        files = self._files(number)
        # Before Slurm is called: if the job starts in between, its controller finds this request.
        files.request("cancel", 0.0)
        slurm_id = files.read_state().slurm_id or self._record(number).engine_job_id
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

    @override
    def forget(self, number: int, *, force: bool = False) -> None:
        self.job(number)  # records the final state
        super().forget(number, force=force)

    def _files(self, number: int) -> JobFiles:
        return JobFiles(job_folder(self._state, number))


def _in_image(task: Task) -> Task:
    """Return a task whose commands run in its container image, if possible.

    It is not if the task has an option of Slurm for containers.

    Raises:
        InvalidInput: it is not the name of an image, or an option of sbatch is invalid.
    """
    image = docker_image(task)
    return task if image is None or has_own_container(wanted_options(task)) else in_image(task, image)


def _policy(task: Task) -> RestartPolicy:
    return RestartPolicy(
        task.num_nodes,
        task.recovery.max_restarts,
        task.recovery.free_codes,
        max_same=max_same(task.envs),
        grace_s=grace_s(wanted_options(task)),
    )


@dataclass(frozen=True, slots=True)
class Script:
    """Contents of the script."""

    name: str
    task_id: str
    num_nodes: int
    options: Options
    controller: tuple[str, ...]  # command line of the controller, with paths that exist on every node
    folder: str  # folder of the job, on a file system that all nodes share
    output: str  # file for the output of the controller and of Slurm

    def text(self) -> str:
        """Return the script."""
        head = "\n".join(["#!/bin/bash", *self._lines()])
        return f"{head}\n\n" + _BODY.format(controller=shlex.join(self.controller))

    def _lines(self) -> Iterator[str]:
        ours: Options = {
            "job-name": self.name,
            "comment": self.task_id,
            "nodes": str(self.num_nodes),
            "ntasks-per-node": "1",
            "chdir": self.folder,
            "output": self.output,
            "open-mode": "append",  # otherwise each start would truncate it
            "requeue": None,
        }
        for name, value in {**ours, **self.options}.items():
            yield f"#SBATCH --{name}" + ("" if value is None else f"={_quoted(value)}")


def _quoted(value: str) -> str:
    """Quote a value for sbatch, which does not support single quotes within double ones."""
    return shlex.quote(value) if any(letter.isspace() or letter in "\"'#" for letter in value) else value


def unsupported_keys(task: Task) -> list[UnsupportedKey]:
    """Return the keys of a task that this engine ignores or changes, in file order."""
    further = [*_sizes(task), *_choices(task), *_infra(task), *_config(task)]
    return find_on_machines(task, _UNSUPPORTED_KEYS, further, bucket="a folder beside those of the jobs")


def _sizes(task: Task) -> Iterator[UnsupportedKey]:
    memory = value_at(task.document, "resources.memory")
    if memory is not None and memory_mib(memory) is None:
        yield UnsupportedKey(
            "resources.memory", task.line_of("resources.memory"), "not passed on: not a fixed amount"
        )
    for key in ("resources.cpus", "resources.memory"):
        value = str(value_at(task.document, key) or "")
        if value.endswith("+"):
            yield UnsupportedKey(
                key, task.line_of(key), f"as {value[:-1]}: Slurm allocates exactly what is requested"
            )


def _choices(task: Task) -> Iterator[UnsupportedKey]:
    choices = task.accelerators.choices
    key = "resources.accelerators"
    if len(choices) > 1:
        what = f"only the first, {choices[0][0]}: sbatch does not support alternatives of GPUs"
        yield UnsupportedKey(key, task.line_of(key), what)
    elif choices:
        what = f"as --gres=gpu:{choices[0][0].lower()}:{int(choices[0][1])}; if the cluster calls its GPUs "
        yield UnsupportedKey(key, task.line_of(key), what + f"otherwise, give gres in {FURTHER}")


def _infra(task: Task) -> Iterator[UnsupportedKey]:
    infra = value_at(task.document, "resources.infra")
    if infra is not None:
        parts = str(infra).split("/")
        is_slurm = parts[0].lower() == "slurm"
        what = f"the partition {parts[2]!r} of it" if is_slurm and len(parts) == 3 else _CHOICE
        yield UnsupportedKey("resources.infra", task.line_of("resources.infra"), what)


def _config(task: Task) -> Iterator[UnsupportedKey]:
    config: Any = task.document.get("config")
    for name in config if isinstance(config, Mapping) else ():
        if name != "slurm":
            what = "settings of clouds and clusters; kept for other engines"
            yield UnsupportedKey(f"config.{name}", task.line_of(f"config.{name}"), what)
