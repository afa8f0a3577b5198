"""The engine of Slurm clusters: hands tasks to sbatch as jobs that come back, and tells where they stand."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from holdfast.entry import command
from holdfast.errors import Conflict, HoldfastError, RetryLater, Unsupported
from holdfast.jobs import engine
from holdfast.jobs.due import Due
from holdfast.jobs.engine import Effect, Job, Line
from holdfast.jobs.environment import mint_task_id
from holdfast.jobs.following import Reader, Watch
from holdfast.jobs.machine import Life, Terms
from holdfast.jobs.node.folder import JobFolder, job_folder
from holdfast.jobs.node.forgetting import forget
from holdfast.jobs.node.mounts.link import attach, read_links
from holdfast.jobs.node.mounts.placing import place
from holdfast.jobs.node.mounts.refusal import check
from holdfast.jobs.node.plan import write_whole
from holdfast.jobs.node.workdir import check_workdir, put_workdir
from holdfast.jobs.place import database, state_dir
from holdfast.jobs.records import Record, Records, Spec
from holdfast.jobs.slurm import commands
from holdfast.jobs.slurm.commands import Queued
from holdfast.jobs.slurm.effects import effects
from holdfast.jobs.slurm.options import grace_s, wanted_options
from holdfast.jobs.slurm.papers import Asked, Facts, Papers, Story
from holdfast.jobs.slurm.script import Script
from holdfast.jobs.slurm.states import stand
from holdfast.jobs.status import Status
from holdfast.jobs.task.contents import MountMode, Task
from holdfast.surroundings import read_progress

_LOOK_S = 2.0
"""How often followers look: what other machines write wakes nobody here."""
_DEAF_TO_USR1 = "trap '' USR1; "
"""Before a script: Slurm may signal all processes of a job, and most die of SIGUSR1."""


class SlurmEngine(engine.Engine):
    """Runs jobs on the Slurm cluster that this machine is a login node of.

    Args:
        state: folder of all jobs, on a file system that all nodes share; by default that of this user.
    """

    name = "slurm"

    def __init__(self, state: Path | None = None) -> None:
        self._state = state or state_dir()

    # -- taking over -----------------------------------------------------------------------------------------

    @override
    def effects(self, task: Task) -> list[Effect]:
        return effects(task)

    def handover(self, task: Task) -> list[str]:
        """See Engine.handover: the script that sbatch would be given."""
        script = self._script(task, "JOB", "TASK-ID")
        return ["$ sbatch --parsable sbatch.sh", *script.text().splitlines()]

    @override
    def check(self, task: Task) -> None:
        wanted_options(task)
        check_workdir(task)
        for mount in task.file_mounts:
            where = f"{task.path}:{mount.line}: file_mounts.{mount.target}"
            if mount.is_remote or mount.mode is MountMode.MOUNT_CACHED:
                raise Unsupported(
                    f"{where}: on Slurm, buckets are not mounted in this version. Give its URL to the "
                    "training as its home, with local= for a fast disk. Nothing was started."
                )
            target = Path(mount.target).expanduser()
            if target.is_absolute() and not target.is_relative_to(Path.home()):
                raise Unsupported(
                    f"{where}: on Slurm, only paths below ~ or relative to the workdir are made visible on "
                    "all nodes. Choose such a path. Nothing was started."
                )
        check(task, self._state)

    @override
    def submit(self, task: Task) -> Job:
        self.check(task)
        commands.require()
        now_s = time.time()
        spec = Spec(task.num_nodes, task.accelerators.num_per_node, bool(task.setup), getpass.getuser(), [])
        terms = _terms(task)
        with self._records() as records:
            number = records.reserve(task.name, spec, terms, now_s, engine=self.name)
            task_id = mint_task_id(task.name, number, now_s)
            papers = self._papers(number)
            try:
                self._put_together(task, number, task_id, spec, terms)
            except (OSError, shutil.Error) as error:
                shutil.rmtree(papers.job.path, ignore_errors=True)
                raise RetryLater(
                    f"The job could not be put together in {papers.job.path}: {error}. Nothing was started."
                ) from error
            # Before Slurm has it: a job that runs must be known here, whatever becomes of this process.
            records.complete(number, task_id)
            try:
                records.name_outside(number, commands.submit(papers.script))
            except HoldfastError:
                records.take_back(number)
                raise
        return self.job(number)

    def _put_together(self, task: Task, number: int, task_id: str, spec: Spec, terms: Terms) -> None:
        """Write down all that the job needs on its nodes."""
        papers = self._papers(number)
        folder = papers.job
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.logs.mkdir(exist_ok=True)
        for name, text in (("setup", task.setup), ("run", task.run)):
            if text:
                write_whole(folder.script(name), _DEAF_TO_USR1 + text.rstrip("\n") + "\n")
        papers.write_facts(
            Facts(
                number=number,
                name=task.name,
                task_id=task_id,
                num_nodes=spec.num_nodes,
                num_gpus=spec.num_gpus,
                has_setup=spec.has_setup,
                user=spec.user,
                terms=terms,
                task_environment={**task.envs, **task.secrets},
            )
        )
        put_workdir(task, folder)
        place(task, folder, self._state)
        attach(folder, is_in_use=lambda target: self._is_in_use(number, target), state=self._state)
        write_whole(papers.script, self._script(task, str(number), task_id).text())

    def _script(self, task: Task, number: str, task_id: str) -> Script:
        folder = self._state / "jobs" / number
        output = Papers(JobFolder(folder)).output
        options = wanted_options(task)
        controller = tuple(command("holdfast.jobs.slurm", "controller", str(folder)))
        return Script(task.name, task_id, task.num_nodes, options, controller, str(folder), str(output))

    def _is_in_use(self, number: int, target: str) -> bool:
        """True if another job that has not ended needs its link at this path."""
        with self._records() as records:
            others = [one for one in records.all() if one.id != number and not one.life.status.is_final]
        folders = (job_folder(self._state, one.id) for one in others)
        return any(link.target == target for folder in folders for link in read_links(folder))

    # -- seeing ----------------------------------------------------------------------------------------------

    @override
    def jobs(self) -> list[Job]:
        with self._records() as records:
            found = records.all(self.name)
        return self._look(found)

    @override
    def job(self, number: int) -> Job:
        (found,) = self._look([self._record(number)])
        return found

    def _record(self, number: int) -> Record:
        with self._records() as records:
            return records.get(number)

    def _look(self, found: list[Record]) -> list[Job]:
        """The jobs as they stand now; Slurm is asked once, for all that have not ended."""
        stories = {one.id: self._papers(one.id).story() for one in found if not one.life.status.is_final}
        outer = {one.id: stories[one.id].slurm_id or one.outer_id for one in found if one.id in stories}
        open_ids = [
            slurm_id
            for number, slurm_id in outer.items()
            if slurm_id and not stories[number].life.status.is_final
        ]
        try:
            queued, trouble = commands.look(open_ids), ""
        except (RetryLater, Unsupported) as error:
            queued, trouble = {}, str(error)
        return [
            self._job(one, stories.get(one.id), queued.get(outer.get(one.id) or ""), trouble) for one in found
        ]

    def _job(self, record: Record, story: Story | None, queued: Queued | None, trouble: str) -> Job:
        if story is None:  # it had ended when it was last looked at
            return Job.of(record, step=self._step(record))
        life = self._life(record, story, queued, trouble)
        if life.status.is_final:
            ended_s = story.ended_unix_s or time.time()
            with self._records() as records:
                began_s = story.started_unix_s
                records.save(
                    record.id, life, Due(), now_unix_s=ended_s, step_before=None, started_unix_s=began_s
                )
        record = dataclasses.replace(
            record,
            started_unix_s=story.started_unix_s,
            ended_unix_s=(story.ended_unix_s or time.time()) if life.status.is_final else None,
        )
        return Job.of(record, step=self._step(record), life=life)

    def _life(self, record: Record, story: Story, queued: Queued | None, trouble: str) -> Life:
        life = story.life
        if life.status.is_final:
            return life
        if trouble:
            return dataclasses.replace(life, reason=f"Slurm does not answer: {trouble}")
        papers = self._papers(record.id)
        slurm_id = story.slurm_id or record.outer_id
        if not slurm_id:
            return dataclasses.replace(life, reason="not in Slurm's queue yet, or sbatch was interrupted")
        if queued is None:
            story = papers.story()  # it may have ended between our two looks
            state = commands.look_back(slurm_id)
            life, queued = story.life, None if state is None else Queued(state, "")
        is_cancelled = any(one.kind == "cancel" for one in papers.asked())
        return stand(life, queued, is_cancelled=is_cancelled, output=str(papers.output))

    def _step(self, record: Record) -> int | None:
        return max(read_progress(job_folder(self._state, record.id).progress).values(), default=None)

    # -- asking ----------------------------------------------------------------------------------------------

    @override
    def cancel(self, number: int) -> Job:
        job = self.job(number)
        if job.status.is_final:
            raise Conflict(f"Job {number} has ended already: {job.status.value}.")
        papers = self._papers(number)
        # Before Slurm is asked: if the job begins in between, its controller finds this.
        papers.ask(Asked("cancel", 0.0))
        slurm_id = papers.story().slurm_id or self._record(number).outer_id
        if slurm_id:
            commands.cancel_waiting(slurm_id)
        return self.job(number)

    @override
    def preempt(self, number: int, *, lead_s: float) -> Job:
        job = self.job(number)
        if job.status.is_final:
            raise Conflict(f"Job {number} has ended already: {job.status.value}.")
        if job.status not in (Status.STARTING, Status.RUNNING):
            raise Conflict(
                f"Job {number} is {job.status.value} and has no process that could be preempted now. It was "
                "left as it is."
            )
        self._papers(number).ask(Asked("preempt", lead_s))
        return job

    @override
    def forget(self, number: int, *, force: bool = False) -> None:
        self.job(number)  # what became of it is written down when it is looked at
        with self._records() as records:
            forget(records, self._state, number, force=force)

    # -- output ----------------------------------------------------------------------------------------------

    @override
    def lines(self, number: int, *, follow: bool, with_changes: bool = False) -> Iterator[Line]:
        folder = job_folder(self._state, number)
        num_nodes = self._record(number).spec.num_nodes
        readers: dict[int | None, Reader] = {None: Reader(folder.changed)} if with_changes else {}
        readers.update({rank: Reader(folder.log(rank)) for rank in range(num_nodes)})
        with contextlib.ExitStack() as stack:
            for reader in readers.values():
                stack.callback(reader.close)
            watch = Watch(folder.path, folder.logs)
            stack.callback(watch.close)
            is_end = not follow
            while True:
                is_end = is_end or self.job(number).status.is_final  # asked before the last of it is read
                for node, reader in readers.items():
                    yield from (Line(node, text) for text in reader.lines(is_end=is_end))
                if is_end:
                    return
                watch.wait(_LOOK_S)

    def _papers(self, number: int) -> Papers:
        return Papers(job_folder(self._state, number))

    def _records(self) -> Records:
        return Records(database(self._state))


def _terms(task: Task) -> Terms:
    return Terms(
        task.num_nodes,
        task.recovery.max_restarts,
        task.recovery.free_codes,
        grace_s=grace_s(wanted_options(task)),
    )
