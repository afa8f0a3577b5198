"""Shared part of all engines: jobs in this user's records, their output, and unsupported keys of a task."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace
from typing_extensions import override

from holdfast.errors import Conflict, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.jobs.engine import Job, Line, UnsupportedKey, each
from holdfast.jobs.environment import JobPipeline, create_task_id, tag
from holdfast.jobs.folder import JobFolder, job_folder, state_dir
from holdfast.jobs.journal import write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.container import containers, release_containers
from holdfast.jobs.node.mounts import mount_records
from holdfast.jobs.node.mounts.mount_plan import validate_sources
from holdfast.jobs.node.mounts.uploads import upload_status
from holdfast.jobs.node.preparation import prepare
from holdfast.jobs.node_spec import Environment
from holdfast.jobs.notifications import announce, write_plan
from holdfast.jobs.outcome import max_same
from holdfast.jobs.output import LogReader, OutputBlock, OutputSelection, interleaved, texts
from holdfast.jobs.records import JobRecord, JobSpec, Records, Submission
from holdfast.jobs.state_machine import GRACE_S, RestartPolicy
from holdfast.jobs.task.model import Task, TaskFile, docker_image, in_image, value_at
from holdfast.jobs.task.subscription import subscribe
from holdfast.system.environment import NOTIFY, read_progress
from holdfast.system.linux import locks
from holdfast.system.log import get_logger
from holdfast.system.units import plural

_log = get_logger("jobs")

_READ_S = 0.3  # pause between two reads of a followed job's output
_LOCK_LIMIT_S = 10.0
_POLL_S = 0.02
_CONTAINERS_LIMIT_S = 60.0


class RecordedEngine(ABC):
    """Place that runs jobs, which are in this user's records, and whose output is in the jobs' folders."""

    name: str  # name of the engine, as in `--on`
    can_notify = False  # true if the jobs of the engine send notifications
    is_here = False  # true if jobs run on this machine, with the variables of the shell that launches them
    no_pipelines: str = ""  # why the engine does not run pipelines, and what to use instead
    poll_s = 0.3  # interval for asking for the status of a job that is followed or waited for

    def __init__(self, state: Path | None = None) -> None:
        self._state = state or state_dir()
        self._records = Records(self._state)

    @abstractmethod
    def _unsupported(self, task: Task) -> Iterator[tuple[str, str]]:
        """Yield the keys of a task that this engine ignores or interprets differently, and how."""

    def unsupported_keys(self, task: Task) -> list[UnsupportedKey]:
        """Return the keys of a task that this engine ignores or interprets differently, by line."""
        found = (UnsupportedKey(key, task.line_of(key), what) for key, what in self._unsupported(task))
        return sorted(found, key=lambda key: key.line)

    def render(self, task: Task) -> list[str]:
        """Return the lines that this engine would submit to another system, if any."""
        return []

    @abstractmethod
    def check(self, task: Task) -> None:
        """Check that the engine can run a task, without changing or sending anything."""

    def check_file(self, file: TaskFile) -> None:
        """Check that the engine can run all tasks of a file; see `check`."""
        if file.is_pipeline and self.no_pipelines:
            what = f"a pipeline of {len(file.tasks)} tasks: {self.no_pipelines}"
            raise Unsupported(f"{file.path}: {what} Nothing was started.")
        for task in file.tasks:
            self.check(task)

    @abstractmethod
    def submit_file(self, file: TaskFile) -> list[Job]:
        """Submit the tasks of a file. Each starts once the one before has succeeded.

        From then on the jobs are independent of the calling process.

        Blocks: while the workdirs are copied.
        """

    def subscribed(
        self, file: TaskFile, targets: Sequence[str] | None, statuses: Sequence[str] | None
    ) -> TaskFile:
        """Return the tasks with the subscription of their launch; see `subscribe`."""
        subscription = subscribe(targets, statuses)
        if not subscription.targets:
            return file
        if not self.can_notify and targets is None:
            _log.warning("jobs on %s do not send notifications: %s is ignored", self.name, NOTIFY)
            return file
        if not self.can_notify:
            raise Unsupported(
                f"--notify: jobs on {self.name} do not send notifications, as no controller of Holdfast runs "
                "there. Use --on local or slurm, or have the task itself send a message. Nothing was started."
            )
        tasks = tuple(replace(task, subscription=subscription) for task in file.tasks)
        return replace(file, tasks=tasks)

    @abstractmethod
    def _current(self, records: list[JobRecord]) -> list[Job]:
        """Return the current jobs of some records."""

    def jobs(self) -> list[Job]:
        """Return all jobs of this engine, newest last. Restarts missing controllers."""
        return self._current(self._records.all(self.name))

    def job(self, number: int) -> Job:
        """Return a job."""
        (found,) = self._current([self._records.get(number)])
        return found

    @abstractmethod
    def cancel(self, number: int) -> Job:
        """Cancel a job: send a notice, so that it can save, and kill it after the grace period."""

    def cancel_all(self, numbers: Sequence[int]) -> list[Job | HoldfastError]:
        """Cancel all jobs that can be, and return each, or the error of `cancel`."""
        return list(each(self.cancel, numbers))

    @abstractmethod
    def preempt(self, number: int, *, lead_s: float) -> Job:
        """Simulate a preemption: send a notice, and kill all processes after `lead_s` seconds."""

    def forget(self, number: int, *, force: bool = False) -> None:
        """Remove a job that has ended, with its files and output. Complete removals that were interrupted.

        With `force`, remove it even if this loses files that are not in a bucket.
        """
        records, folder = self._records, job_folder(self._state, number)
        for left in records.folders_set_aside():
            _remove_folder(left)
        self.job(number)  # records the final state, if only the engine knows it
        record = records.get(number)
        # A job that has only just ended releases its lock in a moment.
        give_up_s = time.monotonic() + (_LOCK_LIMIT_S if record.state.job_state.status.is_final else 0.0)
        while (lock := locks.acquire(folder.lock)) is None and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
        try:
            _check_removable(records, record, has_lock=lock is not None)
            if not force and (summary := upload_status(folder).summary):
                raise Conflict(
                    f"Job {number} was not removed: {summary}. `holdfast drain` waits for uploads. "
                    "With --force these files are lost."
                )
            _remove_containers(folder, number)
            # Before anything is removed: below a mount are the bucket's files.
            mount_records.unmount_below(folder.path)
            mount_records.remove_links(folder)
            _remove_folder(records.set_aside(number))
        finally:
            if lock is not None:
                os.close(lock)

    def lines(self, number: int, what: OutputSelection) -> Iterator[Line]:
        """Yield the lines of the output with their times. Very long lines come in parts."""
        for block in self.output(number, replace(what, is_timed=True)):
            yield from (Line(block.node, text, block.unix_s) for text in texts(block))

    def output(self, number: int, what: OutputSelection) -> Iterator[OutputBlock]:
        """Yield output. The blocks of several nodes are in the order of their times."""
        num_nodes, node = self._records.get(number).job.spec.num_nodes, what.node
        if node is not None and node >= num_nodes:
            nodes = plural(num_nodes, "node")
            raise NotFound(f"Job {number} has no node {node}: it has {nodes}, counted from 0.")
        ranks = range(num_nodes) if node is None else (node,)
        folder = job_folder(self._state, number)
        is_timed = what.is_timed or len(ranks) > 1
        readers = [LogReader(folder.changed)] if what.with_changes else []
        readers += [LogReader(folder.log(rank), rank, tail=what.tail, is_timed=is_timed) for rank in ranks]
        if not what.follow:
            yield from interleaved(readers, is_end=True)
            return
        next_query_s = 0.0
        while True:
            is_end = False
            if time.monotonic() >= next_query_s:
                is_end = self.job(number).status.is_final  # before the last output is read
                next_query_s = time.monotonic() + self.poll_s
            yield from interleaved(readers, is_end=is_end)
            if is_end:
                return
            time.sleep(_READ_S)

    def _grace_s(self, task: Task) -> float:
        return GRACE_S

    def _spec(self, task: Task, after: int | None) -> JobSpec:
        """Return the shape of a job, which starts after another one in a pipeline."""
        num_gpus, is_set_up = task.accelerators.num_per_node, bool(task.setup)
        return JobSpec(task.num_nodes, num_gpus, is_set_up, getpass.getuser(), after, image=task.image or "")

    def _submissions(self, file: TaskFile, tasks: list[Task], numbers: list[int]) -> list[Submission]:
        """Return the submissions of the tasks of a file, with their numbers."""
        now_s = time.time()
        found: list[Submission] = []
        for position, (task, number) in enumerate(zip(tasks, numbers, strict=True)):
            name = f"{file.name}_{task.name}" if file.is_pipeline else task.name
            task_id = create_task_id(name, numbers[0], now_s, position)
            policy = RestartPolicy(
                task.num_nodes,
                task.recovery.max_restarts,
                task.recovery.free_codes,
                max_same=max_same(task.envs),
                grace_s=self._grace_s(task),
            )
            spec = self._spec(task, numbers[position - 1] if position else None)
            found.append(Submission(number, task.name, task_id, self.name, spec, policy, now_s))
        return found

    def _announce(self, record: JobRecord) -> None:
        """Send the notification of a status, if the controller was killed before it did so."""
        folder = job_folder(self._state, record.job.number)
        announce(folder, record.state.job_state, log=folder.controller_log)

    def _newest_step(self, record: JobRecord) -> int | None:
        return read_progress(job_folder(self._state, record.job.number).progress).newest_step


class NodeEngine(RecordedEngine):
    """Engine whose nodes run agents of Holdfast, which find all files of the job in its folder."""

    script_prefix = ""  # commands for the beginning of each script's first line

    @abstractmethod
    def _runs_image(self, task: Task) -> bool:
        """Return True if this engine can run the commands of a task in its container image."""

    def _in_image(self, task: Task) -> Task:
        """Return a task whose commands run in its container image, if possible, or else the task as it is."""
        image = docker_image(task)
        return task if image is None or not self._runs_image(task) else in_image(task, image)

    def _user_variables(self) -> dict[str, str]:
        """Return the variables of this user for a job, where its nodes do not have them."""
        return {}

    @abstractmethod
    def _complete(self, task: Task, folder: JobFolder, submission: Submission) -> None:
        """Write the files of a job that only this engine needs."""

    @abstractmethod
    def _start(self, task: Task, submission: Submission) -> None:
        """Start the first job of a file, which is recorded."""

    def _check_place(self) -> None:
        """Check that jobs can be submitted here."""

    @override
    def submit_file(self, file: TaskFile) -> list[Job]:
        self.check_file(file)
        self._check_place()
        tasks = [self._in_image(task) for task in file.tasks]
        for task in tasks:
            validate_sources(task, self._state)
        records = self._records
        folders: list[JobFolder] = []  # created just now, so they may be removed
        try:
            for _ in tasks:
                folders.append(job_folder(self._state, records.reserve()))  # noqa: PERF401 - each to be removed
            submissions = self._submissions(file, tasks, [int(folder.path.name) for folder in folders])
            task_ids = tuple(one.task_id for one in submissions)
            pipeline = JobPipeline(submissions[0].number, task_ids) if file.is_pipeline else None
            for task, folder, submission in zip(tasks, folders, submissions, strict=True):
                with _refused(folder):
                    prepare(task, folder, records, self._state, prefix=self.script_prefix)
                    variables = {**task.envs, **task.secrets}
                    environment = Environment(self._user_variables(), variables, pipeline)
                    write_document(folder.environment, environment)
                    self._complete(task, folder, submission)
                    write_plan(folder, task.subscription, submission)
        except BaseException:
            for folder in folders:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        # Before the start: a running job must be recorded, even if this process dies. The first one last, as
        # until it is visible, none of the others starts.
        for submission in reversed(submissions):
            records.complete(submission)
        self._start(tasks[0], submissions[0])
        return self._current([records.get(one.number) for one in submissions])


@contextlib.contextmanager
def _refused(folder: JobFolder) -> Iterator[None]:
    """Explain an error of the file system while a job is prepared."""
    try:
        yield
    except HoldfastError:
        raise  # some of them are an OSError too
    except (OSError, shutil.Error) as error:
        raise RetryLater(f"Cannot prepare the job in {folder.path}: {error}. Nothing was started.") from error


def check_active(job: Job) -> None:
    """Check that a job has not ended."""
    if job.status.is_final:
        raise Conflict(f"Job {job.id} has already ended: {job.status.value}.")


def no_process(job: Job) -> Conflict:
    """Return the error for a preemption of a job without processes."""
    return Conflict(f"Job {job.id} is {job.status.value} and has no process to preempt. Nothing was changed.")


def _check_removable(records: Records, record: JobRecord, *, has_lock: bool) -> None:
    """Check that a job has ended, that none of its processes is running, and that no other job needs it."""
    if not record.state.job_state.status.is_final or not has_lock:
        raise Conflict(
            f"Job {record.job.number} is {record.state.job_state.status.value}, so it was not removed. Use "
            f"`holdfast cancel {record.job.number}` to end it."
        )
    if left := processes.tagged(tag(record.job.task_id), processes.snapshot()):
        pids = ", ".join(str(one.pid) for one in left[:5])
        raise Conflict(
            f"Job {record.job.number} has ended, but some of its processes are still finishing (pid {pids}). "
            "It was not removed. Try again when they are gone."
        )
    for later in records.successors(record.job.number):
        if not later.state.job_state.status.is_final:
            raise Conflict(
                f"Job {record.job.number} comes before job {later.job.number} ({later.job.name}) in a "
                "pipeline, so it was not removed. Remove it when that job has ended."
            )


def _remove_containers(folder: JobFolder, number: int) -> None:
    """Wait until the containers of a job are removed, which its wardens do."""
    release_containers(folder)
    give_up_s = time.monotonic() + _CONTAINERS_LIMIT_S
    while left := containers(folder):
        if time.monotonic() > give_up_s or not any(container.is_alive for container in left.values()):
            rank = min(left)
            raise RetryLater(
                f"Job {number} was not removed: its container on node {rank} could not be removed "
                f"(see {folder.log(rank)}). Try again, or remove the container yourself."
            )
        time.sleep(_POLL_S)


def _remove_folder(folder: Path) -> None:
    if mounted := mount_records.mounted_below(folder):
        raise Conflict(f"{mounted[0]} is mounted, so {folder} was not removed.")
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RetryLater(
            f"Cannot remove {folder}: {error}. The job is no longer listed. The next `holdfast "
            "forget` tries again, or remove the folder yourself."
        ) from error


IMAGE = "resources.image_id"
_IN_PLACE = "this file itself: it is there already, so that changes of the job remain"
_CACHED = "settings of rclone, except vfs_cache_max_size; a write-back directory replaces it"
_NO_BASHRC = "~/.bashrc is not read by commands, and keeps what is written; set variables in envs or run"
_OWN_PACKAGES = "`uv pip` sees only the job's own packages, and may install others again; pip sees all"
_BASHRC = re.compile(r">\s*[\"']?(?:~|\$HOME|\$\{HOME\})/\.(?:bashrc|bash_profile|profile)\b")
_UV_PIP = re.compile(r"\buv\s+pip\s+(?:install|sync)\b")


def find_unsupported(task: Task, engine: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a task that an engine ignores or changes whatever their values are, and how."""
    from holdfast.jobs.task.document import read_table  # slow, and only launches need it

    for key, of_engines in read_table("task/unsupported_keys.yaml").items():
        what = of_engines if isinstance(of_engines, str) else of_engines.get(engine)
        is_used = key == IMAGE and task.image is not None
        if what and key in task.lines and not is_used and value_at(task.document, key) is not None:
            yield key, what


def find_on_machines(task: Task, engine: str, *, bucket: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that an engine which runs the commands itself ignores or changes, and how."""
    yield from find_unsupported(task, engine)
    for key, text in (("setup", task.setup), ("run", task.run)):
        if _BASHRC.search(text):
            yield key, _NO_BASHRC
        if task.image is None and _UV_PIP.search(text):
            yield key, _OWN_PACKAGES
    private = list(mount_records.private_mounts(task))
    for mount in task.file_mounts:
        if mount.is_in_place:
            yield mount.key, _IN_PLACE
        if value_at(mount.spec, "config.mount_cached"):
            yield f"{mount.key}.config.mount_cached", _CACHED
        if mount.source is None and mount.bucket:
            yield mount.key, f"{bucket} replaces the bucket {mount.bucket!r}"
        if mount in private:
            yield mount.key, mount_records.private_note()
