"""The controller of a job: tells the machine what happens, writes its answer down, does what is due."""

from __future__ import annotations

import dataclasses
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.following import tail
from holdfast.jobs.local.nodes import Nodes
from holdfast.jobs.local.planning import plans
from holdfast.jobs.machine import (
    Begin,
    Broke,
    Cancel,
    Drains,
    Ended,
    Event,
    Gone,
    Life,
    Notice,
    Ran,
    Told,
    Waited,
    advance,
)
from holdfast.jobs.node import processes
from holdfast.jobs.node.bell import Bell
from holdfast.jobs.node.folder import JobFolder, job_folder
from holdfast.jobs.node.mounts.clearing import Clearing
from holdfast.jobs.node.mounts.link import attach, detach, read_links
from holdfast.jobs.place import database
from holdfast.jobs.records import Records, Request
from holdfast.jobs.status import Status
from holdfast.surroundings import read_progress

_UNKNOWN_S = 0.05
"""How soon a node is looked at again whose warden lives and has not said who it is."""
_AGAIN_S = 1.0
"""How soon is looked again whether all that was killed is gone."""
_LEAD_S = 30.0
_LAST_LINES = 10


def look_after(state: Path, number: int) -> None:
    """Look after a job until it has ended; the caller holds the job's lock.

    Blocks: as long as the job lives.
    """
    try:
        with Records(database(state)) as records:
            _look_after(records, job_folder(state, number), number)
    except RetryLater as error:
        # The records or a disk failed. What runs goes on; the next command takes it over from here.
        sys.stderr.write(f"{time.strftime('%F %T')} job {number}: given up for now: {error}\n")


def _look_after(records: Records, folder: JobFolder, number: int) -> None:
    controller = Controller(records, folder, number)
    try:
        controller.serve()
    except RetryLater:
        raise
    except Exception as error:  # noqa: BLE001 - it is told, to the log and as the job's status
        traceback.print_exc()
        why = f"{error if isinstance(error, HoldfastError) else repr(error)} (see {folder.controller_log})"
        controller.give_up(why)
    finally:
        controller.close()
    if controller.is_over:
        detach(folder)


class Controller:
    """Whoever holds the job's lock.

    Args:
        records: of all jobs.
        folder: of this job.
        number: of this job.
    """

    def __init__(self, records: Records, folder: JobFolder, number: int) -> None:
        self._records = records
        self._folder = folder
        self._record = records.get(number)
        self._life, self._due = self._record.life, self._record.due
        self._step_before = self._record.step_before
        self._is_leaving = False
        self._nodes = self._new_nodes()
        self._clearing = Clearing(folder, self._life.attempt)
        self._is_started = False  # as far as this process knows
        self._has_told = self._due.tell_until_unix_s is None
        self._bell = Bell(folder.bell)

    def close(self) -> None:
        """Let go of what runs."""
        self._nodes.close()
        self._bell.close()

    def serve(self) -> None:
        """Until the job has ended, or this machine does.

        Blocks: on the bell, on the ends of wardens, and on the next deadline.
        """
        processes.inherit_orphans()
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.set_wakeup_fd(self._bell.fd, warn_on_full_buffer=False)  # a signal rings too
        self._apply(Begin())
        while not (self.is_over or (self._is_leaving and not self._has_nodes)):
            self._do_what_is_due()
            if self._see():
                continue  # what was seen may have made something due
            self._wait()

    @property
    def _has_nodes(self) -> bool:
        """True if something of the job may be running."""
        return self._life.is_active and self._life.status is not Status.WINDING_DOWN

    @property
    def is_over(self) -> bool:
        """True if the job has ended."""
        return self._life.status.is_final

    def give_up(self, why: str) -> None:
        """Something here is broken: end the job rather than leave it unwatched."""
        if self._life.is_active:
            self._nodes.kill(with_keepers=False)
        self._apply(Broke(why))

    def _on_sigterm(self, *_: object) -> None:
        """The machine goes, or somebody wants us gone: a notice for the job, which our successor takes on."""
        self._is_leaving = True

    # -- the machine -----------------------------------------------------------------------------------------

    def _apply(self, event: Event, answered: Request | None = None) -> None:
        """Take an event to the machine; what it answers is written down before anything is done about it."""
        before = self._life
        life, orders = advance(before, event, self._record.terms)
        life = self._with_unsent(self._with_last_words(life))
        now_s = time.time()
        due = self._due.plus(orders, now_s)
        if life.attempt != before.attempt:
            self._step_before = self._step()
        if (life, due) != (self._life, self._due) or answered is not None:
            self._records.save(
                self._record.id,
                life,
                due,
                now_unix_s=now_s,
                step_before=self._step_before,
                answered=answered.id if answered is not None else None,
            )
        if due.tell_until_unix_s != self._due.tell_until_unix_s:
            self._has_told = due.tell_until_unix_s is None
        self._life, self._due = life, due
        if life.attempt != before.attempt:
            self._nodes.close()
            self._nodes, self._is_started = self._new_nodes(), False
            self._clearing = Clearing(self._folder, life.attempt)
        if (life.status, life.attempt, life.reason) != (before.status, before.attempt, before.reason):
            self._tell_followers()

    def _with_last_words(self, life: Life) -> Life:
        """With the last lines of the log, if the job has failed just now: why is mostly told there."""
        if life.status not in (Status.FAILED, Status.FAILED_SETUP) or life.status is self._life.status:
            return life
        ranks = [rank for rank, one in sorted(life.outcomes.items()) if not one.is_success] or [0]
        lines = "\n".join(f"  {line}" for line in tail(self._folder.log(ranks[0]), _LAST_LINES))
        reason = f"{life.reason}\nThe last lines of node {ranks[0]}:\n{lines}" if lines else life.reason
        return dataclasses.replace(life, reason=reason)

    def _with_unsent(self, life: Life) -> Life:
        """With what is not in its bucket, if the job has ended just now."""
        if not life.status.is_final or self._life.status.is_final or not life.attempt:
            return life
        told = self._clearing.last_told()
        return dataclasses.replace(life, reason="; ".join(filter(None, (life.reason, told))))

    def _new_nodes(self) -> Nodes:
        record = self._record
        return Nodes(self._folder, record.task_id, self._life.attempt, record.spec.num_nodes)

    def _tell_followers(self) -> None:
        life = self._life
        reason = life.reason.partition("\n")[0]
        line = f"attempt {life.attempt} {life.status.value} {reason}".rstrip()
        with self._folder.changed.open("a") as file:
            file.write(f"{time.strftime('%F %T')} {line}\n")

    def _step(self) -> int | None:
        return max(read_progress(self._folder.progress).values(), default=None)

    # -- doing -----------------------------------------------------------------------------------------------

    def _do_what_is_due(self) -> None:
        """All of it may have been done before, by a controller that was killed before it could say so."""
        if not self._life.is_active:
            return
        if not self._is_started:
            self._start()
        if not self._has_told and self._due.tell_until_unix_s is not None:
            self._nodes.look(self._due.kill_unix_s)
            num_told = self._nodes.tell(self._due.tell_source, self._due.tell_until_unix_s)
            self._has_told = True
            self._apply(Told(self._life.attempt, num_told))
        if self._due.kill_unix_s is not None and time.time() >= self._due.kill_unix_s:
            self._nodes.look(self._due.kill_unix_s)  # what ended by itself until now did so by itself
            self._nodes.kill(with_keepers=self._due.kill_keepers)

    def _start(self) -> None:
        """Start what of the attempt has not been started; ended for good is what was there before it."""
        if not self._folder.attempt(self._life.attempt).exists():
            self._nodes.end_earlier()
        attach(self._folder, is_in_use=self._is_in_use, state=self._folder.path.parents[1])
        self._nodes.start(plans(self._record, self._life, self._folder))
        self._is_started = True

    def _is_in_use(self, target: str) -> bool:
        """True if another job that has not ended needs its link at this path."""
        others = (
            one for one in self._records.all() if one.id != self._record.id and not one.life.status.is_final
        )
        folders = (job_folder(self._folder.path.parents[1], one.id) for one in others)
        return any(link.target == target for folder in folders for link in read_links(folder))

    # -- seeing ----------------------------------------------------------------------------------------------

    def _see(self) -> bool:
        """Take what has happened to the machine; True if there was anything."""
        before = (self._life, self._due)
        self._bell.hush()
        processes.bury()
        if self._is_leaving and self._life.is_active and not self._life.is_noticed:
            self._apply(Notice(_LEAD_S, "this machine is shutting down"))
        for request in self._records.requests(self._record.id):
            self._apply(self._event_of(request), request)
        if self._life.is_active:
            for event in self._events_of_nodes():
                self._apply(event)
        if (
            self._due.wake_unix_s is not None
            and time.time() >= self._due.wake_unix_s
            and not self._is_leaving
        ):
            self._apply(Waited())
        return (self._life, self._due) != before

    def _event_of(self, request: Request) -> Event:
        if request.kind == "cancel":
            return Cancel()
        return Notice(request.lead_s if request.lead_s is not None else _LEAD_S)

    def _events_of_nodes(self) -> Iterator[Event]:
        attempt = self._life.attempt
        self._nodes.look(self._due.kill_unix_s)
        if self._life.status is not Status.RUNNING and self._nodes.have_run:
            yield Ran(attempt)
        outcomes = self._nodes.outcomes()
        for node, outcome in outcomes.items():
            if node not in self._life.outcomes:
                yield Ended(attempt, node, outcome)
        if len(outcomes) == self._record.spec.num_nodes:
            self._nodes.kill(with_keepers=False)
            if self._clearing.is_over(self._drain_until_unix_s(), self._nodes.have_keepers):
                yield Gone(attempt, self._has_advanced())
            elif told := self._clearing.told():
                yield Drains(attempt, told)

    def _drain_until_unix_s(self) -> float | None:
        """Until when files are waited for that are not in their bucket yet; None for as long as it takes.

        A job has not done its work before they are. One that goes on has them here, and waits only as long as
        its machine is said to be there. One that is cancelled leaves them to the background.
        """
        if self._life.status is Status.CANCELLING:
            return 0.0
        is_done = all(one.is_success for one in self._life.outcomes.values())
        return None if is_done else self._due.tell_until_unix_s or 0.0

    def _has_advanced(self) -> bool | None:
        """True if a newer checkpoint is known than when the attempt began; None if none ever was."""
        step = self._step()
        if step is None:
            return None
        return self._step_before is None or step > self._step_before

    # -- waiting ---------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for the bell, for the end of a warden or for the next deadline."""
        poll = select.poll()
        for fd in (self._bell.fd, *self._nodes.fds()):
            poll.register(fd, select.POLLIN)
        poll.poll(self._timeout_ms())

    def _timeout_ms(self) -> float | None:
        if self._life.is_active and self._nodes.has_unknown:
            return _UNKNOWN_S * 1000
        moment = self._due.next_unix_s()
        if self._nodes.is_killed and self._life.is_active:
            return _AGAIN_S * 1000  # the wardens ring when it is done; one may just have begun with `run`
        if moment is None:
            return None
        return max(0.0, moment - time.time()) * 1000
