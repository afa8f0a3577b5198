"""The engine of the user's own SkyPilot: hands tasks to `sky jobs launch`, and tells what it says of them."""

from __future__ import annotations

import dataclasses
import getpass
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from holdfast.errors import Conflict, HoldfastError, RetryLater, Unsupported
from holdfast.jobs import engine
from holdfast.jobs.due import Due
from holdfast.jobs.engine import Effect, Job, Line
from holdfast.jobs.environment import mint_task_id
from holdfast.jobs.machine import Life, Terms
from holdfast.jobs.node.folder import job_folder
from holdfast.jobs.node.forgetting import forget
from holdfast.jobs.node.plan import write_whole
from holdfast.jobs.node.workdir import check_workdir
from holdfast.jobs.place import database, state_dir
from holdfast.jobs.records import Record, Records, Spec
from holdfast.jobs.sky import commands
from holdfast.jobs.sky.document import handed_text, outer_name
from holdfast.jobs.sky.effects import effects
from holdfast.jobs.sky.states import Managed
from holdfast.jobs.task.contents import Task


class SkyEngine(engine.Engine):
    """Runs jobs wherever the user's SkyPilot does.

    Args:
        state: folder of all jobs; by default that of this user.
    """

    name = "sky"

    def __init__(self, state: Path | None = None) -> None:
        self._state = state or state_dir()

    # -- taking over -----------------------------------------------------------------------------------------

    @override
    def effects(self, task: Task) -> list[Effect]:
        return effects(task)

    def handover(self, task: Task) -> list[str]:
        """See Engine.handover: the file that `sky` would be given."""
        words = commands.launch_words(outer_name(task.name, "JOB"), "task.yaml", task.secrets)
        return [f"$ sky {' '.join(words)}", *handed_text(task, "TASK-ID", "JOB").splitlines()]

    @override
    def check(self, task: Task) -> None:
        check_workdir(task)

    @override
    def submit(self, task: Task) -> Job:
        self.check(task)
        sys.stderr.write(f"holdfast: {commands.version()} is given the job; this may take minutes\n")
        now_s = time.time()
        spec = Spec(task.num_nodes, task.accelerators.num_per_node, bool(task.setup), getpass.getuser(), [])
        terms = Terms(task.num_nodes, task.recovery.max_restarts, task.recovery.free_codes)
        with self._records() as records:
            number = records.reserve(task.name, spec, terms, now_s, engine=self.name)
            task_id = mint_task_id(task.name, number, now_s)
            path = job_folder(self._state, number).path / "task.yaml"
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(path, handed_text(task, task_id, str(number)))
            except OSError as error:
                raise RetryLater(f"{path} could not be written: {error}. Nothing was started.") from error
            # Before SkyPilot has it: a job that runs must be known here, whatever becomes of this process.
            records.complete(number, task_id)
            try:
                outer_id = commands.launch(outer_name(task.name, str(number)), path, task.secrets)
            except HoldfastError:
                records.take_back(number)
                raise
            if outer_id is not None:
                records.name_outside(number, outer_id)
        return self.job(number)

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
        """The jobs as they stand now; SkyPilot is asked once, if any has not ended."""
        if all(record.life.status.is_final for record in found):
            return [Job.of(record) for record in found]
        try:
            managed, trouble = commands.queue(), ""
        except (RetryLater, Unsupported) as error:
            managed, trouble = [], str(error).partition("\n")[0]
        return [Job.of(self._now(record, managed, trouble)) for record in found]

    def _now(self, record: Record, managed: list[Managed], trouble: str) -> Record:
        """A record with what SkyPilot says, which is written down when it is the last word."""
        if record.life.status.is_final:
            return record
        if trouble:
            reason = f"SkyPilot does not answer: {trouble}"
            return dataclasses.replace(record, life=dataclasses.replace(record.life, reason=reason))
        one = _find(record, managed)
        if one is None:
            reason = f"SkyPilot does not know it by the name {outer_name(record.name, str(record.id))!r}"
            return dataclasses.replace(record, life=dataclasses.replace(record.life, reason=reason))
        has_begun = one.started_unix_s is not None
        life = Life(
            status=one.status,
            attempt=one.recoveries + 1 if has_begun else 0,
            recoveries=one.recoveries,
            reason=one.reason,
        )
        now_s = one.ended_unix_s or time.time()
        with self._records() as records:
            if record.outer_id is None:
                records.name_outside(record.id, one.id)
            began_s = one.started_unix_s
            records.save(record.id, life, Due(), now_unix_s=now_s, step_before=None, started_unix_s=began_s)
        return dataclasses.replace(
            record,
            life=life,
            outer_id=one.id,
            started_unix_s=one.started_unix_s,
            ended_unix_s=one.ended_unix_s,
        )

    # -- asking ----------------------------------------------------------------------------------------------

    @override
    def cancel(self, number: int) -> Job:
        job = self.job(number)
        if job.status.is_final:
            raise Conflict(f"Job {number} has ended already: {job.status.value}.")
        commands.cancel(self._outer_id(number))
        return self.job(number)

    def preempt(self, number: int, *, lead_s: float) -> Job:
        """See Engine.preempt: SkyPilot has no command for that."""
        outer_id = self._outer_id(number)
        raise Unsupported(
            f"Job {number} is managed job {outer_id} of SkyPilot, which has no command that preempts one. To "
            "see it survive, end its machine in the cloud's console."
        )

    def _outer_id(self, number: int) -> str:
        outer_id = self._record(number).outer_id
        if outer_id is None:
            self.job(number)
            outer_id = self._record(number).outer_id
        if outer_id is None:
            raise Conflict(f"SkyPilot has not told its number of job {number}. Try again when it has begun.")
        return outer_id

    @override
    def forget(self, number: int, *, force: bool = False) -> None:
        self.job(number)  # what became of it is written down when it is looked at
        with self._records() as records:
            forget(records, self._state, number, force=force)

    # -- output ----------------------------------------------------------------------------------------------

    def lines(self, number: int, *, follow: bool, with_changes: bool = False) -> Iterator[Line]:
        """See Engine.lines; SkyPilot puts the nodes' names before their lines itself."""
        for text in commands.logs(self._outer_id(number), follow=follow):
            yield Line(0, text)

    def _records(self) -> Records:
        return Records(database(self._state))


def _find(record: Record, managed: list[Managed]) -> Managed | None:
    """The managed job of a record: by its number, or by its name if SkyPilot was interrupted telling that."""
    name = outer_name(record.name, str(record.id))
    return next(
        (
            one
            for one in managed
            if one.id == record.outer_id or (record.outer_id is None and one.name == name)
        ),
        None,
    )
