"""Worker of a keeper: persists staged saves in order, commits them, deletes old ones, and exits."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.format.sections import Sections
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.keeper import messages, packets
from holdfast.checkpoint.keeper.committer import Committed, PendingSave, was_committed
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.inbox import Received, StagedSave, TrainerInbox
from holdfast.checkpoint.keeper.lockfile import Lockfile
from holdfast.checkpoint.keeper.memory_store import offer_images
from holdfast.checkpoint.keeper.messages import Image
from holdfast.checkpoint.keeper.pulse import PulseReader, TrainerProgress
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS, Reports, bugs_as_errors
from holdfast.checkpoint.keeper.save_files import SaveFiles
from holdfast.checkpoint.keeper.tiers import KeeperTiers
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatches
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import Conflict, Corrupt, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.system import backoff
from holdfast.system.log import reported_if_slow

if TYPE_CHECKING:
    from holdfast.checkpoint.keeper.peers.mirror import Mirror

_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 1.0
"""Shortest and longest pause between two checks for other ranks' parts."""
_LOOK_SHARE = 0.2
"""Pause between checks, as a share of the time waited so far."""
_OPEN_PAUSE_S = 1.0
"""Pause before another try to open a store."""
_PERSIST_S = 5.0
"""Longest time after the trainer's end that a successor waits for saves which are being written."""
_FIND_RUN_S = 60.0
"""Time that a network file system may take to show a document which another host has written."""


def serve(end: socket.socket, lockfile: Lockfile) -> None:
    """Serve the trainer at the other end of a socket until all work is done."""
    try:
        message, fds = packets.receive(end)
        if isinstance(message, messages.Configure):
            listener = socket.socket(fileno=fds.pop()) if message.config.peers is not None else None
            inbox = TrainerInbox(end, lockfile.info.trainer_pid)
            inbox.start()
            pulse = PulseReader(*fds) if fds else None
            worker = Worker(inbox, message.config, lockfile, pulse=pulse, listener=listener)
            worker.run()
            worker.wind_up()
    finally:
        lockfile.remove()


class Worker:
    """Main loop of a keeper. Its lock file shows whether it has data that is not durable yet."""

    def __init__(
        self,
        inbox: TrainerInbox,
        config: KeeperConfig,
        lockfile: Lockfile,
        *,
        pulse: PulseReader | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._inbox, self._config, self._lockfile = inbox, config, lockfile
        self._store = open_patiently(config.nearest, inbox)
        if config.claim:
            wait_for_run(self._store, config.run, inbox)
        history = History(self._store, config.writer)
        self._reports = Reports(history, inbox, "home" if config.local is None else "local", config.home)
        self._pulse = pulse
        self._home = None if config.local is None else open_patiently(config.home, inbox)
        self._watches = KeeperWatches(config.watches, self._run_of, self._read_base)
        components = KeeperComponents(config, inbox, self._reports, self._watches, self._store, self._home)
        self._files = SaveFiles(components)
        self._arenas = MappedArenas()
        self._next: StagedSave | None = None  # the save that was taken from the inbox
        self._late_metrics: dict[int, SaveValues] = {}  # not written yet, by step
        self._pending: list[PendingSave] = []
        self._trainer_ended_s: float | None = None  # time at which its end was noticed
        self._has_ended = False  # this loop
        self._tiers = KeeperTiers(components, self._in_work)
        self._mirror = None if listener is None else self._open_mirror(listener)

    def _open_mirror(self, listener: socket.socket) -> Mirror:
        from holdfast.checkpoint.keeper.peers.mirror import Mirror

        mirror = Mirror(self._config, listener, self._reports.history, self._inbox)
        self._inbox.copy_to(mirror)
        self._offering = threading.Thread(target=self._offer_to_successor, name="holdfast-offer")
        self._offering.start()
        return mirror

    def _run_of(self, name: str) -> KeeperRun:
        history = self._reports.history
        return KeeperRun(name, self._config, self._lockfile.info, history, self._has_work, self._inbox)

    def _read_base(self, ancestors: Ancestors) -> Sections:
        """Return the findings of the watches about the checkpoint that this attempt continues."""
        store = self._home if self._home is not None and self._config.is_node_local else self._store
        with contextlib.suppress(Corrupt, NotFound, Unsupported):  # it may be in another tier only
            if ancestors:
                return read_manifest(store, ancestors[-1], self._config.run).watches
        return {}

    def _has_work(self) -> bool:
        return bool(self._pending) or self._inbox.has_saves or self._next is not None

    def run(self) -> None:
        """Work until the trainer has exited and nothing is left in the nearest tier."""
        self._watches.start()  # they watch the trainer in threads of their own
        while True:
            has_work = bool(self._pending or self._late_metrics)
            received = self._inbox.receive(self._pause_s(), has_work=has_work)
            if self._inbox.trainer_gone:
                self._end_trainer()
            if received:
                self._lockfile.set_busy(True)
                self._next = received[-1] if isinstance(received[-1], StagedSave) else None
            self._tiers.retry_delayed()
            for item in received or ():
                self._handle(item)
            self._replace_metrics()
            if received is None and not self._pending and not self._must_retry_metrics():
                break
            self._commit_ready()
            self._lockfile.set_busy(self._inbox.has_saves)
        self._tiers.join_retention()
        self._has_ended = True

    def _end_trainer(self) -> None:
        """Record that the trainer was killed, and pass its end on to the watches, once."""
        if self._trainer_ended_s is not None:
            return
        self._trainer_ended_s = time.monotonic()
        if self._pulse is not None and not self._inbox.has_closed:
            self._record_killed_step(self._pulse.read())
            self._pulse.close()
        self._watches.trainer_ended(in_order=self._inbox.has_closed)

    def _record_killed_step(self, progress: TrainerProgress) -> None:
        """Record the newest completed step of a trainer that did not record its end, at that time."""
        if progress.beats_here < 1:
            return  # no step was completed, or a loop of its own counts them
        since_s = (time.monotonic_ns() - progress.beat_ns) / 1e9
        self._reports.history.record(
            "killed",
            step=progress.step,
            unix_s=time.time() - since_s,
            detail="the trainer ended without recording its end; this was its newest completed step",
        )
        with contextlib.suppress(HoldfastError):
            self._store.flush()

    def wind_up(self) -> None:
        """Drain what is due, and offer the contents of the memory to the next attempt."""
        with contextlib.suppress(HoldfastError):  # the history is for people, and the trainer has exited
            self._store.flush()
        if self._inbox.frees_memory:
            self._tiers.close(with_newest=False)
            return
        self._lockfile.set_done()
        draining = threading.Thread(
            target=self._tiers.close, kwargs={"with_newest": True}, name="holdfast-wind-up"
        )
        draining.start()
        if self._mirror is None and self._arenas.images():
            self._offer()
        elif self._mirror is not None:
            self._offering.join()
        draining.join()

    def _offer_to_successor(self) -> None:
        """Offer the memory soon after the trainer's end: a lost host's parts are missing from all saves."""
        self._inbox.wait_gone()
        if self._inbox.frees_memory:
            return
        gone_s = time.monotonic()
        while time.monotonic() < gone_s + self._patience_s():
            time.sleep(_FIRST_LOOK_S)
        self._offer()

    def _patience_s(self) -> float:
        """Return how many seconds the newest save is younger than the newest one in the mirror, 5 at most."""
        saves = [*self._inbox.saves, *filter(None, [self._next])]
        newest_s = max((save.received_s for save in saves), default=0.0)
        return min(_PERSIST_S, max(0.0, newest_s - (self._mirror.newest_s if self._mirror else 0.0)))

    def _offer(self) -> None:
        if self._config.keep_in_memory_s > 0:
            with contextlib.suppress(OSError):  # the runtime folder is full; everything durable is in home
                offer_images(self._lockfile, self._images, timeout_s=self._config.keep_in_memory_s)

    def _images(self) -> dict[int, tuple[Image, ...]]:
        """Return everything in memory that a later attempt can use."""
        if self._mirror is None:
            return self._arenas.images()
        # Arenas of saves that are being written come and go: they are offered once that has ended.
        return self._mirror.images() | (self._arenas.images() if self._has_ended else {})

    def _in_work(self) -> set[CheckpointId]:
        steps = [save.step for save in tuple(self._pending)]
        steps += [save.request.step for save in self._inbox.saves]
        steps += [] if self._next is None else [self._next.request.step]
        return {CheckpointId(attempt=self._config.attempt, step=step) for step in steps}

    def _pause_s(self) -> float | None:
        """Return the time until the next check; None for no limit."""
        if self._pending:
            return max(0.0, min(save.next_look_s for save in self._pending) - time.monotonic())
        return _LAST_LOOK_S if self._tiers.delayed or self._late_metrics else None

    def _handle(self, item: Received) -> None:
        match item:
            case StagedSave():
                self._persist(item)
            case messages.ResumeCommit():
                save = PendingSave(item.step, item.num_bytes, item.to_home, time.monotonic())
                self._pending.append(save)
            case messages.DropSave():
                self._tiers.drop(item)
            case messages.DrainCheckpoint():
                self._tiers.drain(item.checkpoint_id)
            case messages.DrainBest():
                self._tiers.set_best(item.steps, is_due=item.is_due)
            case messages.DeleteStep():
                self._tiers.delete(item.step)
            case messages.UpdateMetrics():
                self._late_metrics[item.step] = messages.decode_metrics(item)
            case messages.MarkComplete():
                self._tiers.mark_complete(item.checkpoint_id)
            case messages.RecordEvent():
                self._reports.history.record(**asdict(item))

    # -- persist ---------------------------------------------------------------------------------------------
    def _persist(self, save: StagedSave) -> None:
        request, began = save.request, time.monotonic()
        metrics = self._late_metrics.pop(request.step, None) or messages.decode_metrics(request)
        needed = set[int]() if self._mirror is None else self._mirror.arenas
        self._arenas.unmap_except({*request.arenas, request.arena, *needed})
        arena = self._arenas.map(request.arena, save.arena_fd)
        try:
            with bugs_as_errors(f"Step {request.step}"):
                if not (request.is_resent and self._was_committed(request.step)):
                    self._files.persist(save, arena, metrics)
                    if metrics.values:
                        self._tiers.note_metrics(request.step, metrics, is_late=False)
        except HoldfastError as error:
            self._reports.failed(request.step, error)
            if self._config.world_size > 1 and not isinstance(error, Conflict):
                self._tiers.drop(messages.DropSave(request.step, str(error)))  # the others wait for it
        else:
            # Before the arena is released: a successor of this keeper must not need an arena that is reused.
            seconds, num_bytes = time.monotonic() - began, request.layout.data_bytes
            self._replace_metrics()  # first: at the report, the trainer forgets what it has sent before
            self._reports.reached(request.step, "persisted", num_bytes=num_bytes, seconds=seconds)
            images = request.layout.images(request.step, self._config.attempt, self._config.rank)
            self._arenas.set_images(request.arena, images)
            self._pending.append(PendingSave(request.step, num_bytes, request.to_home, save.received_s))
        finally:
            self._next = None
            os.close(save.draft_fd)
            if self._mirror is not None:
                self._mirror.release(request.arena)
            else:
                self._inbox.reply(messages.ArenaReleased(request.arena))

    def _was_committed(self, step: int) -> bool:
        with contextlib.suppress(*TRANSIENT_ERRORS):
            return was_committed(self._store, self._config.writer, step)
        return False

    def _replace_metrics(self) -> None:
        """Write the metrics that were recorded after their save was submitted."""
        if not self._late_metrics:
            return
        queued = {save.request.step for save in self._inbox.saves}  # their metrics are written with them
        for step in self._late_metrics.keys() - queued:
            with contextlib.suppress(*TRANSIENT_ERRORS):  # they stay, to be tried again
                self._files.replace_metrics(step, self._late_metrics[step])
                self._tiers.note_metrics(step, self._late_metrics[step], is_late=True)
                del self._late_metrics[step]

    def _must_retry_metrics(self) -> bool:
        """Return True while late metrics are left, unless the store has failed for long since the end."""
        gone_s = 0.0 if self._trainer_ended_s is None else time.monotonic() - self._trainer_ended_s
        return bool(self._late_metrics) and gone_s < self._config.linger_s

    # -- commit ----------------------------------------------------------------------------------------------
    def _commit_ready(self) -> None:
        """Commit the pending saves whose check is due, where possible."""
        now_s = time.monotonic()
        for save in [save for save in self._pending if save.next_look_s <= now_s]:
            outcome = self._try_commit(save, now_s)
            if outcome is None:
                waited_s = now_s - save.received_s
                pause_s = backoff.proportional(waited_s, _LOOK_SHARE, _FIRST_LOOK_S, _LAST_LOOK_S)
                save.next_look_s = now_s + pause_s
                continue
            self._pending.remove(save)
            if isinstance(outcome, HoldfastError):
                self._reports.failed(save.step, outcome)
            else:
                self._tiers.finish(save, outcome, time.monotonic() - save.received_s)

    def _try_commit(self, save: PendingSave, now_s: float) -> Committed | HoldfastError | None:
        """Return the commit of a save, its final error, or None if it must wait."""
        config = self._config
        limit_s = config.linger_s if self._inbox.trainer_gone else config.commit_timeout_s
        try:
            with bugs_as_errors(f"Step {save.step}"):
                return self._tiers.try_commit(save, limit_s)
        except TRANSIENT_ERRORS as error:  # only of the check or the manifest: this rank's part is durable
            if now_s - save.received_s > limit_s:
                return RetryLater(str(error), step=save.step)
            if save.is_worth_a_line(error.kind):
                self._inbox.report_delay(save.step, str(error))
            return None
        except HoldfastError as error:
            return error


def open_patiently(place: str, inbox: TrainerInbox) -> Store:
    """Open a store as soon as it responds."""
    with _reported(inbox, f"{place} has not answered since its keeper started."):
        while True:
            try:
                return open_store(place)
            except TRANSIENT_ERRORS as error:
                if inbox.trainer_gone:
                    raise
                inbox.set_delay(str(error))
                time.sleep(_OPEN_PAUSE_S)


def wait_for_run(store: Store, run: str, inbox: TrainerInbox) -> None:
    """Wait until the nearest store shows its run, which the trainer has written there.

    From then on a local store knows its root, and does not make it anew if somebody deletes it.
    """
    deadline = time.monotonic() + _FIND_RUN_S
    with _reported(inbox, f"{store.url} does not show run {run}, which was claimed there."):
        while True:
            trainer_gone = inbox.trainer_gone  # before the look
            try:
                found = read_run(store)
            except (*TRANSIENT_ERRORS, Corrupt, Unsupported) as error:
                inbox.set_delay(str(error))
            else:
                if found is not None and found.id == run:
                    return
                if found is not None or trainer_gone or time.monotonic() > deadline:
                    raise Conflict(
                        f"{store.url} was deleted since run {run} was claimed there: it holds "
                        f"{'no run' if found is None else f'run {found.id}'}. Nothing is written."
                    )
            time.sleep(_OPEN_PAUSE_S)


@contextlib.contextmanager
def _reported(inbox: TrainerInbox, reason: str) -> Iterator[None]:
    """Report a long wait to the trainer, unless the body has done so."""
    try:
        with reported_if_slow(lambda: inbox.set_delay(reason)):
            yield
    finally:
        inbox.set_delay("")


class _Arena(Struct):
    fd: int
    memory: mmap.mmap
    images: tuple[Image, ...] = ()


class MappedArenas:
    """Mappings of arenas by number."""

    def __init__(self) -> None:
        self._arenas: dict[int, _Arena] = {}

    def map(self, number: int, fd: int) -> memoryview:
        """Return the memory of an arena, mapped at its first use. It takes over the descriptor."""
        if number in self._arenas:
            os.close(fd)
        else:
            self._arenas[number] = _Arena(fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        return memoryview(self._arenas[number].memory)

    def unmap_except(self, numbers: Collection[int]) -> None:
        """Unmap the arenas that the trainer has freed: a mapping keeps their memory in use."""
        for number in self._arenas.keys() - set(numbers):
            with contextlib.suppress(BufferError):  # the traceback of a failed write refers to it: next time
                self._arenas[number].memory.close()
                os.close(self._arenas.pop(number).fd)

    def set_images(self, number: int, images: tuple[Image, ...]) -> None:
        """Record the images in an arena. They stay until the next save is copied over them."""
        self._arenas[number].images = images

    def images(self) -> dict[int, tuple[Image, ...]]:
        """Return the images of each arena by its descriptor."""
        return {arena.fd: arena.images for arena in self._arenas.values() if arena.images}
