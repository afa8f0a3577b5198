"""The keeper's main loop: takes staged saves, persists them in order, commits, retains, then ends."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast import backoff
from holdfast.errors import Conflict, Denied, HoldfastError, Internal, InvalidInput, RetryLater
from holdfast.failpoint import failpoint
from holdfast.format import names
from holdfast.format import part as parts
from holdfast.format.part import Ancestors
from holdfast.home.attempts import check_claim, check_not_fenced
from holdfast.home.commit import check_not_refused, commit, is_committed, read_committed, refuse
from holdfast.home.history import History
from holdfast.home.listing import CheckpointId, missing_ranks, newest_committed
from holdfast.home.metrics import write_metrics
from holdfast.home.retain import Deleted, Retention, ShareRetention
from holdfast.keeper import protocol
from holdfast.keeper.config import KeeperConfig
from holdfast.keeper.drain import Drain, Drained
from holdfast.keeper.frozen import FrozenFile
from holdfast.keeper.held import Image, offer
from holdfast.keeper.persist import persist
from holdfast.keeper.presence import Presence, living, process_start
from holdfast.keeper.protocol import MAX_DETAIL, Message
from holdfast.policy import Keep
from holdfast.store import Store, open_store

_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 1.0  # shortest and longest pause between looks for other ranks' parts
_LOOK_SHARE = 0.2  # else a pause is this share of the time waited so far
_PASSING = (Denied, RetryLater)
"""Errors of a store that the same call may not meet later: what failed is not given up for one of them."""
_TOLD_BY_ALL = "every rank has told that its files are there"


@dataclass(slots=True)
class Job:
    """One save on its way to a commit."""

    step: int
    arena: int = 0
    num_bytes: int = 0
    frozen_at: int = 0  # where in the arena the image of the frozen tensors' file begins
    frozen_bytes: int = 0  # 0: there is none
    is_frozen_unchanged: bool = False  # so the trainer believes
    ancestors: Ancestors | None = None  # known once it is committed
    draft_fd: int = -1  # -1: persisted already, only the commit is left
    to_home: bool = True  # it is to be drained
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # on rank 0
    was_sent: bool = False  # to a keeper of this rank that has died since
    hopeless: RetryLater | None = None  # why it will never be committed
    received_s: float = 0.0
    next_look_s: float = 0.0


def serve(end: socket.socket, presence: Presence) -> None:
    """Serve the trainer at the other end of `end` until it is gone and nothing is left to do."""
    try:
        message, _ = protocol.receive(end)
        if message is not None:
            desk = Desk(end, presence.trainer_pid)
            threading.Thread(target=desk.run, name="holdfast-desk", daemon=True).start()
            work = Work(desk, KeeperConfig.parse(message["terms"]), presence)
            work.run()
            work.wind_up()
    finally:
        presence.leave()


@dataclass(slots=True)
class Mapped:
    """An arena in this process, and the files whose images it was last known to hold."""

    fd: int
    bytes: mmap.mmap
    images: tuple[Image, ...] = ()


class Desk:
    """Takes the trainer's messages while the work goes on, and knows when the trainer is gone."""

    def __init__(self, end: socket.socket, trainer_pid: int) -> None:
        self.end = end
        self.jobs: deque[Job] = deque()
        self.notes: deque[Message] = deque()
        self.drains: deque[CheckpointId] = deque()  # that the trainer wants in home
        self.drops: deque[Message] = deque()  # saves that this rank has no copy of
        self.metrics: deque[Message] = deque()  # metrics of saves that were received before
        self.best: set[int] | None = None  # steps of the best saves, not yet taken
        self.known: deque[CheckpointId] = (
            deque()
        )  # that are complete although this host's folder does not show it
        self.arenas: dict[int, Mapped] = {}
        self.arena_in_use = 0  # being persisted
        self.said_goodbye = False
        self.trainer_gone = False
        self.changed = threading.Condition()
        self._trainer_pid = trainer_pid

    def run(self) -> None:
        """Take messages until the trainer is gone and all it has sent is taken."""
        try:
            self._take_all()
        finally:  # also after a bug: then this keeper ends, and another one is told what is left
            with self.changed:
                self.trainer_gone = True
                self.changed.notify_all()

    def _take_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.end, selectors.EVENT_READ)
            # A killed trainer's data loader workers may keep its end of the socket open: watch the process
            # too.
            with contextlib.suppress(ProcessLookupError):
                selector.register(os.pidfd_open(self._trainer_pid), selectors.EVENT_READ)
            gone = len(selector.get_map()) == 1
            while self._take_next(selector, timeout_s=0 if gone else None):
                pass

    def _take_next(self, selector: selectors.BaseSelector, *, timeout_s: float | None) -> bool:
        ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if self.end not in ready:
            return False  # only the process's end woke us, and every message it sent has been taken
        message, fds = protocol.receive(self.end)
        if message is None:
            return False
        if message.get("op") == "ping":
            self.tell({"event": "pong"})
            return True
        with self.changed:
            self._take(message, fds)
            self.changed.notify_all()
        return True

    def _take(self, message: Message, fds: list[int]) -> None:
        if message["op"] == "note":
            self.notes.append(message)
            return
        if message["op"] == "drain":
            self.drains.append((message["attempt"], message["step"]))
            return
        if message["op"] == "drop":
            self.drops.append(message)
            return
        if message["op"] == "metrics":
            self.metrics.append(message)
            return
        if message["op"] == "best":
            self.best = set(message["steps"])
            return
        if message["op"] == "known":
            self.known.append((message["attempt"], message["step"]))
            return
        if message["op"] == "close":  # messages that ask whether we live still come
            self.said_goodbye = message["goodbye"]
            self.trainer_gone = True
            return
        job = Job(message["step"], received_s=time.monotonic(), was_sent=message.get("again", False))
        if message["op"] == "save":
            job.arena, job.num_bytes = message["arena"], message["bytes"]
            job.frozen_at, job.frozen_bytes = message["frozen_at"], message["frozen_bytes"]
            job.is_frozen_unchanged = message["is_frozen_unchanged"]
            job.to_home = message["to_home"]
            job.metrics = _decode_metrics(message["metrics"])
            arena_fd, job.draft_fd = fds
            if job.arena in self.arenas:
                os.close(arena_fd)
            else:
                bytes_ = mmap.mmap(arena_fd, 0, access=mmap.ACCESS_READ)
                self.arenas[job.arena] = Mapped(arena_fd, bytes_)
            self._forget_arenas(message["arenas"])
        failpoint("keeper.received")
        self.jobs.append(job)

    def _forget_arenas(self, alive: list[int]) -> None:
        """Let go of arenas that the trainer has given back; a mapping keeps their memory in use."""
        needed = {*alive, *(job.arena for job in self.jobs), self.arena_in_use}
        for number in [number for number in self.arenas if number not in needed]:
            with contextlib.suppress(BufferError):  # a failed write's traceback still holds it: next time
                self.arenas[number].bytes.close()
                os.close(self.arenas.pop(number).fd)

    def tell(self, message: Message) -> None:
        """Tell the trainer, if it is still there."""
        with contextlib.suppress(OSError):
            protocol.send(self.end, message)


class Work:
    """Persists jobs in order, and commits each as soon as all ranks' parts are there."""

    def __init__(self, desk: Desk, terms: KeeperConfig, presence: Presence) -> None:
        self.desk = desk
        self.terms = terms
        self.presence = presence
        self.store = _open_patiently(terms.near, desk)
        self.history = History(self.store, terms.writer)
        self.frozen = FrozenFile(self.store, terms)
        self.retention = Retention(self.store, terms.keep if terms.local is None else Keep(terms.keep_local))
        self.share: ShareRetention | None = None
        if terms.is_scattered:
            self.share = ShareRetention(self.store, Keep(terms.keep_local), terms.is_mine)
        self.newest_known: CheckpointId | None = (
            None  # the newest checkpoint known to be complete, where that is told
        )
        self.newest_in_home: CheckpointId | None = None  # of those that this keeper has drained
        self.drain: Drain | None = None
        if terms.local is not None:
            self.home = _open_patiently(terms.home, desk)
            self.home_retention = Retention(self.home, terms.keep)
            self.drain = Drain(self.store, self.home, terms, self.history, self._after_drain)
            self.is_home_failing = False
        self.newest: Job | None = None  # that this keeper saw committed; not always the last
        self.wanted_home: set[CheckpointId] = set()  # to be drained as soon as they are committed
        self.untold: list[Message] = []  # drops that other ranks have not been told of, as the store failed
        self.best: set[CheckpointId] = set()  # saves of this attempt that have to come home
        self.newest_drained: Drained | None = None
        self.unwritten: dict[int, Message] = {}  # metrics by step, as the store failed
        self.unseen: list[CheckpointId] = []  # wanted in home, while the near tier cannot be looked at
        self.waiting: list[Job] = []  # persisted, not committed
        self.retain_due: list[Job] = []  # committed, what they make superfluous not yet deleted
        self.retaining = threading.Thread()  # never started: nothing is being deleted

    def run(self) -> None:
        """Work until the trainer is gone and nothing is left."""
        while True:
            job = self._next_job()
            is_over = (
                job is None and not self.waiting and self.desk.trainer_gone
            )  # asked before the last notes
            self._write_notes()
            self._take_drains()
            self._take_drops()
            self._take_known()
            self._update_metrics(job)
            self._update_best()
            if is_over:
                break
            if job is not None:
                self._persist(job)
            self._look_for_parts()
            self._retain_if_due()
            self.presence.set_busy(bool(self.desk.jobs))
        while self.retain_due or self.retaining.is_alive():
            self._retain_if_due()
            self.retaining.join()

    def wind_up(self) -> None:
        """What is left once the nearest tier has all: drain, and offer what is in memory to a successor."""
        with contextlib.suppress(HoldfastError):  # the log is for people, and nobody is left to be told
            self.store.flush()
        drain = self.drain
        if self.desk.said_goodbye:
            if drain is not None:
                drain.close()
            return
        self.presence.set_done()
        if drain is not None and self.newest is not None:
            drain.submit(self.terms.attempt, self.newest.step)  # there may be no next attempt
        draining = threading.Thread(target=drain.close if drain else lambda: None, name="holdfast-wind-up")
        draining.start()
        held = {arena.fd: arena.images for arena in self.desk.arenas.values() if arena.images}
        if held and self.terms.hold_s > 0:
            with contextlib.suppress(OSError):  # the folder for traces is full: what is durable is in home
                offer(self.presence, held, hold_s=self.terms.hold_s)
        draining.join()

    def _take_drains(self) -> None:
        wanted, self.unseen = self.unseen, []
        while self.desk.drains:
            wanted.append(self.desk.drains.popleft())
        for one in wanted if self.drain is not None else ():
            try:
                is_near = self._is_near(*one)
            except _PASSING:
                self.unseen.append(one)
                continue
            if is_near:
                self.drain.submit(*one)  # pyright: ignore[reportOptionalMemberAccess] - asked above
            else:
                self.wanted_home.add(one)

    def _take_drops(self) -> None:
        """Write refusals of the saves that this rank has dropped, so that no other rank waits for them."""
        dropped, self.untold = self.untold, []
        while self.desk.drops:
            dropped.append(self.desk.drops.popleft())
        for message in dropped if not self.terms.is_scattered else ():
            step, rank = message["step"], self.terms.rank
            error = InvalidInput(f"Rank {rank} has no copy of it: {message['detail']}", step=step, rank=rank)
            try:
                refuse(self.store, self.terms.writer, step, error)
            except _PASSING:
                self.untold.append(message)

    def _is_near(self, attempt: int, step: int) -> bool:
        """Whether a checkpoint is complete in the near tier, as far as that can be; else it may become so."""
        if not self.terms.is_scattered:
            return self.store.size(names.manifest(step, attempt)) is not None
        is_own = attempt == self.terms.attempt
        return not is_own or self.store.size(names.part(step, attempt, self.terms.rank)) is not None

    def _take_known(self) -> None:
        """Learn which checkpoint is complete by what ranks have told each other, or home shows."""
        while self.desk.known:
            one = self.desk.known.popleft()
            if self.newest_known is not None and one <= self.newest_known:
                continue
            self.newest_known = one
            if self.share is None:
                continue
            if self.terms.rank == 0 and one[0] == self.terms.attempt and one != self.newest_in_home:
                self.history.record("committed", step=one[1], tier=self.tier, detail=_TOLD_BY_ALL)
            self.retain_due.append(Job(one[1]))

    def _update_metrics(self, next_job: Job | None) -> None:
        """Write metrics that were recorded after their save was submitted.

        Args:
            next_job: the save that is persisted next, which is not in the queue any more.
        """
        changed, self.unwritten = self.unwritten, {}
        while self.desk.metrics:
            message = self.desk.metrics.popleft()
            changed[message["step"]] = message
        for step, message in changed.items():
            metrics = _decode_metrics(message["metrics"])
            queued = [job for job in (next_job, *self.desk.jobs) if job is not None and job.step == step]
            for job in queued:
                job.metrics = metrics  # they are written with it
            try:
                if not queued:
                    self._replace_metrics(step, metrics)
            except _PASSING:
                self.unwritten[step] = message

    def _replace_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.store.size(names.part(step, self.terms.attempt, self.terms.rank)) is None:
            return  # the save has failed, or was deleted
        one = self.terms.attempt, step
        write_metrics(self.store, self.terms.writer, step, metrics)
        self.retention.note_metrics(one, metrics)
        if self.drain is not None:
            self.home_retention.note_metrics(one, metrics)
            self.drain.update_metrics(*one)
        elif self.terms.keep_best is not None and self.newest is not None:
            self.retain_due.append(self.newest)

    def _update_best(self) -> None:
        """Have the best saves copied home, also those that are not due there."""
        steps, self.desk.best = self.desk.best, None
        if steps is None or self.drain is None:
            return
        self.best = {(self.terms.attempt, step) for step in steps}
        self._send_best_home()

    def _send_best_home(self) -> None:
        assert self.drain is not None
        with contextlib.suppress(*_PASSING):  # the next change of the best saves sends them
            self.drain.set_best({one for one in self.best if self._is_near(*one)})

    def _next_job(self) -> Job | None:
        desk = self.desk
        with desk.changed:
            waiting = desk.jobs, desk.notes, desk.drains, desk.drops, desk.known, desk.metrics
            is_idle = not any(waiting) and desk.best is None
            if is_idle and (self.waiting or not desk.trainer_gone):
                desk.changed.wait(self._pause_s())
            if not desk.jobs:
                return None
            self.presence.set_busy(True)
            job = desk.jobs.popleft()
            desk.arena_in_use = job.arena
            return job

    def _pause_s(self) -> float | None:
        if not self.waiting:
            return _LAST_LOOK_S if self.unseen or self.untold or self.unwritten else None
        return max(0.0, min(job.next_look_s for job in self.waiting) - time.monotonic())

    def _write_notes(self) -> None:
        while self.desk.notes:
            note = self.desk.notes.popleft()
            self.history.record(
                note["event"],
                step=note["step"],
                num_bytes=note.get("bytes", 0),
                seconds=note.get("seconds", 0.0),
                detail=note.get("detail", ""),
                tier=note.get("tier", ""),
                unix_s=note["t"],
                members=note.get("members"),
            )

    # -- persist ---------------------------------------------------------------------------------------------

    def _persist(self, job: Job) -> None:
        if job.draft_fd < 0:
            self.waiting.append(job)
            return
        began = time.monotonic()
        try:
            with _bugs_told(job.step):
                is_done = job.was_sent and self._is_done(job)
                if not is_done:
                    self._persist_patiently(job)
        except HoldfastError as error:
            self._fail(job, error)
        else:
            # Told before the arena is released: a successor of this keeper must not need an arena that is
            # reused.
            self._tell("persisted", job, num_bytes=job.num_bytes, seconds=time.monotonic() - began)
            self._note_images(job)
            self.waiting.append(job)
        finally:
            os.close(job.draft_fd)
            self.desk.arena_in_use = 0
            self.desk.tell({"event": "released", "arena": job.arena})

    def _note_images(self, job: Job) -> None:
        """Remember what lies in the arena, until another save is copied over it."""
        rank, attempt = self.terms.rank, self.terms.attempt
        images = [Image(names.data(job.step, attempt, rank), 0, job.num_bytes)]
        if job.frozen_bytes:
            images.append(Image(names.frozen(job.step, attempt, rank), job.frozen_at, job.frozen_bytes))
        self.desk.arenas[job.arena].images = tuple(images)

    def _is_done(self, job: Job) -> bool:
        """Return whether a keeper that has died since has committed a save, which may be retired by now."""
        with contextlib.suppress(*_PASSING):
            missing = missing_ranks(self.store, self.terms.writer, job.step)
            return is_committed(self.store, self.terms.writer, job.step) or (
                self.terms.rank in missing and self._is_behind_newer(job.step)
            )
        return False

    def _persist_patiently(self, job: Job) -> None:
        _check_step(job.step)
        for num_failures in range(1, self.terms.num_retries + 2):
            try:
                self._put_data_and_part(job)
            except _PASSING:
                if num_failures > self.terms.num_retries or self.desk.jobs:
                    raise  # a newer save is waiting: it is worth more than another try of this one
                time.sleep(backoff.doubled(num_failures, self.terms.retry_s, math.inf))
            else:
                return

    def _put_data_and_part(self, job: Job) -> None:
        check_not_fenced(self.store, self.terms.attempt)
        check_claim(self.store, self.terms.attempt, self.terms.claim)
        try:
            self._create_files(job)
        except Conflict as error:
            if not self._delete_unfinished(job):
                raise InvalidInput(
                    f"Step {job.step} of attempt {self.terms.attempt} was written before with other bytes "
                    f"({error}), which are never replaced. This save was given up; the files stand. Save a "
                    "later step.",
                    step=job.step,
                    rank=self.terms.rank,
                ) from error
            self._create_files(job)

    def _delete_unfinished(self, job: Job) -> bool:
        """Delete the data files of an earlier try of this save, unless a part describes them."""
        attempt, rank = self.terms.attempt, self.terms.rank
        if self.store.size(names.part(job.step, attempt, rank)) is not None:
            return False
        self.store.delete(names.data(job.step, attempt, rank))
        self.store.delete(names.frozen(job.step, attempt, rank))
        return True

    def _create_files(self, job: Job) -> None:
        terms, arena = self.terms, memoryview(self.desk.arenas[job.arena].bytes)
        frozen = None
        if job.frozen_bytes:  # first: it may be refused, and then nothing need be written
            image = arena[job.frozen_at : job.frozen_at + job.frozen_bytes]
            frozen = self.frozen.persist(job.step, image, must_match=job.is_frozen_unchanged)
        name, image = names.data(job.step, terms.attempt, terms.rank), arena[: job.num_bytes]
        file = persist(self.store, name, image, bytes_per_s=terms.straight_bandwidth)
        failpoint("keeper.data")
        self.history.settle()
        if job.metrics:  # before the part: a complete checkpoint has its metrics
            write_metrics(self.store, terms.writer, job.step, job.metrics)
            self.retention.note_metrics((terms.attempt, job.step), job.metrics)
        draft = os.pread(job.draft_fd, os.fstat(job.draft_fd).st_size, 0)
        self._create_part(job.step, parts.finish(draft, file, frozen))
        failpoint("keeper.part")

    def _create_part(self, step: int, text: bytes) -> None:
        self.store.put_once(names.part(step, self.terms.attempt, self.terms.rank), text)

    # -- commit ----------------------------------------------------------------------------------------------

    def _look_for_parts(self) -> None:
        now_s = time.monotonic()
        for job in [job for job in self.waiting if job.next_look_s <= now_s]:
            done = False
            try:
                with _bugs_told(job.step):
                    done = self._try_commit(job)
            except _PASSING as error:  # the parts are durable: only looking, or the manifest, has failed
                if now_s - job.received_s > self._limit_s():
                    job.hopeless = RetryLater(str(error), step=job.step)
            except HoldfastError as error:
                self.waiting.remove(job)
                self._fail(job, error)
                continue
            if job.hopeless is not None and not done:
                self.waiting.remove(job)
                self._fail(job, job.hopeless)
            elif done:
                self.waiting.remove(job)
                self._after_commit(job)
            else:
                waited_s = now_s - job.received_s
                job.next_look_s = now_s + backoff.proportional(
                    waited_s, _LOOK_SHARE, _FIRST_LOOK_S, _LAST_LOOK_S
                )

    def _try_commit(self, job: Job) -> bool:
        if self.terms.is_scattered:
            job.ancestors = ()
            return True  # nobody sees all parts here: home gets the manifest when it has them
        committed = read_committed(self.store, self.terms.writer, job.step)
        if committed is not None:
            self.store.sync(names.step_dir(job.step))  # rank 0's keeper may not have come to that
            job.ancestors = committed.ancestors
            return True
        missing = missing_ranks(self.store, self.terms.writer, job.step)
        if missing or self.terms.rank != 0:
            check_not_refused(self.store, self.terms.writer, job.step)
        if self.terms.rank in missing and self._is_behind_newer(job.step):
            return True  # committed and, while we did not look, retained away in favour of newer ones
        # Rank 0 alone commits, and rank 0 alone retains: otherwise one could make a checkpoint visible again
        # while another deletes it.
        if self.terms.rank == 0 and not missing:
            job.ancestors = commit(self.store, self.terms.writer, job.step, claim=self.terms.claim).ancestors
            return True
        job.hopeless = self._why_hopeless(job, missing)
        return False

    def _is_behind_newer(self, step: int) -> bool:
        """Return whether a newer save of this attempt is durable."""
        newest = newest_committed(self.store, self.terms.attempt)
        if newest > step:
            self.store.sync(names.step_dir(newest))
        return newest > step

    def _limit_s(self) -> float:
        """Return how long a save may wait for its commit."""
        return self.terms.linger_s if self.desk.trainer_gone else self.terms.commit_timeout_s

    def _why_hopeless(self, job: Job, missing: list[int]) -> RetryLater | None:
        """Return why a save will never be committed; None while it may be."""
        waited_s = time.monotonic() - job.received_s
        alone = self.desk.trainer_gone and self.terms.all_ranks_here and not self._others_busy()
        is_hopeless = alone and self._can_never_be(job)
        if waited_s > self._limit_s() or is_hopeless:
            lacking = f"the parts of ranks {missing}" if missing else "rank 0's commit"
            return RetryLater(
                f"Step {job.step} was not committed: {lacking} did not come in {waited_s:.0f} s. Rank "
                f"{self.terms.rank}'s part is durable; earlier checkpoints stand. Look at those ranks' own "
                "messages.",
                step=job.step,
            )
        return None

    def _can_never_be(self, job: Job) -> bool:
        """True if no keeper of this attempt will complete a save; all trainers are gone.

        With all parts there and rank 0's keeper killed, the next attempt commits, which waits for us.
        """
        is_anybody_to_commit = self.terms.rank == 0 or any(
            trace.attempt == self.terms.attempt and trace.rank == 0 and not trace.is_done
            for _, trace in living(self.terms.home)
        )
        # Look once more: parts or commit may have come between the listing and the look at the other keepers.
        if missing_ranks(self.store, self.terms.writer, job.step):
            return not is_committed(self.store, self.terms.writer, job.step)
        return not is_anybody_to_commit and not is_committed(self.store, self.terms.writer, job.step)

    def _others_busy(self) -> bool:
        return any(
            trace.attempt == self.terms.attempt
            and trace.rank != self.terms.rank
            and (trace.busy or process_start(trace.trainer_pid) == trace.trainer_start)
            for _, trace in living(self.terms.home)
        )

    def _after_commit(self, job: Job) -> None:
        seconds = time.monotonic() - job.received_s
        if self.terms.is_scattered:
            self.desk.tell({"event": "kept", "step": job.step})
        else:
            self._tell("committed", job, num_bytes=job.num_bytes, seconds=seconds)
        one = self.terms.attempt, job.step
        is_newest = self.newest is None or job.step > self.newest.step
        if is_newest and job.ancestors is not None:  # else it has been retained away already
            self.newest = job
        if self.drain is not None and (job.to_home or one in self.wanted_home):
            self.wanted_home.discard(one)
            self.drain.submit(*one)
        elif self.drain is not None and one in self.best:
            self._send_best_home()
        retains = self.terms.rank == 0 and self.share is None and self.retention.keep.last is not None
        if retains and self.newest is not None:
            # As of the newest: an older save may have waited longer for another rank's part, and seen from
            # there newer ones do not count.
            self.retain_due.append(self.newest)

    def _retain_if_due(self) -> None:
        """Delete old checkpoints in a thread: a file system may take seconds to free gigabytes."""
        if not self.retain_due or self.retaining.is_alive():
            return
        job = max(self.retain_due, key=lambda job: job.step)
        self.retain_due.clear()
        self.retaining = threading.Thread(target=self._retain, args=(job,), name="holdfast-retain")
        self.retaining.start()

    def _retain(self, job: Job) -> None:
        attempt = self.terms.attempt
        in_work = {(attempt, other.step) for other in (*self.waiting, *self.desk.jobs)}
        if self.drain is not None:
            in_work |= self.drain.needed() | self.wanted_home
        with self._telling_retain_trouble(job):
            if self.share is None:
                old = self.retention.apply((attempt, job.step), job.ancestors or (), in_work)
            else:
                assert self.newest_known is not None
                in_home = {self.newest_in_home} if self.newest_in_home else set()
                old = self.share.apply(self.newest_known, in_work | in_home)
            self._delete_old(self.store, old, self.tier)
        with self.desk.changed:
            self.desk.changed.notify_all()  # what has become due meanwhile can begin

    def _delete_old(self, store: Store, old: Iterable[Deleted], tier: str) -> None:
        for deleted in old:
            detail = f"attempt {deleted.attempt}, {'complete' if deleted.was_complete else 'half done'}"
            self.history.record("retained", step=deleted.step, detail=detail, tier=tier)
        for folder in ("step-", "attempts/"):  # the first of them and the root
            store.sweep(folder)

    # -- drain -----------------------------------------------------------------------------------------------

    @property
    def tier(self) -> str:
        """The tier that saves are committed in first."""
        return "home" if self.drain is None else "local"

    def _after_drain(self, drained: Drained) -> None:
        """Runs in the drain's thread."""
        job = Job(drained.step)
        error = drained.error
        if error is None:
            self.is_home_failing = False
            whose = "" if drained.attempt == self.terms.attempt else f"attempt {drained.attempt}"
            numbers = {"num_bytes": drained.num_bytes, "seconds": drained.seconds}
            self._note_in_home((drained.attempt, drained.step))  # first: who is told may end us
            self._tell("drained", job, tier="home", detail=whose, **numbers)
            if self.terms.rank == 0 and self.terms.keep_last is not None:
                self._retain_home(drained)
        elif isinstance(error, Conflict):
            self._fail(job, error)
        elif drained.is_over or not self.is_home_failing:  # not each of many tries
            self.is_home_failing = not drained.is_over
            kind = type(error).__name__ if drained.is_over else ""
            self._tell("drain-failed", job, tier="home", detail=str(error), kind=kind)

    def _note_in_home(self, one: CheckpointId) -> None:
        with self.desk.changed:
            self.newest_in_home = max(one, self.newest_in_home or one)
            self.desk.known.append(one)
            self.desk.changed.notify_all()

    def _retain_home(self, drained: Drained) -> None:
        newest = self.newest_drained
        if newest is None or (drained.attempt, drained.step) > (newest.attempt, newest.step):
            self.newest_drained = newest = drained
        with self._telling_retain_trouble(Job(drained.step), tier="home"):
            old = self.home_retention.apply((newest.attempt, newest.step), newest.ancestors, set())
            self._delete_old(self.home, old, "home")

    @contextlib.contextmanager
    def _telling_retain_trouble(self, job: Job, *, tier: str | None = None) -> Iterator[None]:
        """Report an error of retention to the trainer; what was not deleted is found again next time."""
        try:
            with _bugs_told(job.step):
                yield
        except HoldfastError as error:
            self._tell("retain-failed", job, detail=str(error), tier=tier)

    # -- telling ---------------------------------------------------------------------------------------------

    def _fail(self, job: Job, error: HoldfastError) -> None:
        event = "fenced" if isinstance(error, Conflict) else "failed"
        self._tell(event, job, detail=str(error), kind=type(error).__name__)

    def _tell(
        self,
        event: str,
        job: Job,
        *,
        num_bytes: int = 0,
        seconds: float = 0.0,
        detail: str = "",
        kind: str = "",
        tier: str | None = None,
    ) -> None:
        tier = self.tier if tier is None else tier
        self.history.record(
            event, step=job.step, num_bytes=num_bytes, seconds=seconds, detail=detail, tier=tier
        )
        trouble, self.history.trouble = self.history.trouble, None
        self.desk.tell(
            {
                "event": event,
                "step": job.step,
                "bytes": num_bytes,
                "seconds": seconds,
                "detail": detail[:MAX_DETAIL],
                "kind": kind,
                "history_trouble": trouble,
            }
        )


def _decode_metrics(values: Mapping[str, float | str]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _check_step(step: object) -> None:
    """Refuse a step that no name can hold: its files would never be found again.

    Raises:
        InvalidInput: it is no whole number of 0 or more.
    """
    if type(step) is not int or step < 0:
        raise InvalidInput(f"A step is a whole number of 0 or more, got {step!r}. Nothing was saved.")


@contextlib.contextmanager
def _bugs_told(step: int) -> Iterator[None]:
    """Turn a bug into an error of one save: a keeper that died of it would take all other saves along."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise Internal(f"Step {step} failed by a bug of Holdfast's: {error!r}.") from error


def _open_patiently(place: str, desk: Desk) -> Store:
    """Open a place as soon as it answers.

    Raises:
        Denied, RetryLater: it did not before the trainer was gone.
    """
    while True:
        try:
            return open_store(place)
        except _PASSING:
            if desk.trainer_gone:
                raise
            time.sleep(_LAST_LOOK_S)
