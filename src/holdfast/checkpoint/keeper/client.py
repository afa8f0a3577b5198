"""Client of a keeper, in the trainer: submits saves, and receives their outcomes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from msgspec import Struct, field
from typing_extensions import override

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.keeper import messages
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.lockfile import wait_while
from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.keeper.supervisor import SupervisedKeeper
from holdfast.errors import (
    ERRORS,
    Conflict,
    Denied,
    HoldfastError,
    InvalidInput,
    RetryLater,
    SaveWarning,
    WatchWarning,
)
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.units import format_duration

_log = get_logger("checkpoint.keeper")
_NO_VALUES = SaveValues()
_MAX_DELETIONS = 1000
"""Steps to be deleted that a new keeper is sent again. Older ones have long been deleted."""
_MAX_LISTED_ARENAS = 64
"""Arenas that a message lists. With more, the keeper keeps only the one of the save mapped: a list in each
message of a long queue would cost more than the saves."""
_MAX_UNSAVED = 64
"""Messages since the last save that a new keeper is sent again. Older ones have long been handled."""


class _Submitted(Struct):
    """Save that a new keeper would be sent again."""

    save: Save
    arena: int
    arena_fd: int
    layout: messages.ArenaLayout
    draft: bytes
    to_home: bool
    metrics: SaveValues
    before: tuple[messages.TrainerMessage, ...] = ()  # must be handled before the save is committed
    is_persisted: bool = False
    since_s: float = field(default_factory=time.monotonic)  # in the keeper, or persisted


@final
class Keeper(SupervisedKeeper):
    """This rank's keeper, as the trainer sees it.

    Args:
        released: called with the number of each arena that may be used again.
    """

    def __init__(self, config: KeeperConfig, *, released: Callable[[int], None], pulse_fd: int = -1) -> None:
        super().__init__(config, pulse_fd=pulse_fd)
        self.problems: list[tuple[str, type[Warning]]] = []  # to warn the user of with the next save
        self.fenced: HoldfastError | None = None  # of a save after a newer attempt has claimed the run
        self.home_lost: HoldfastError | None = None  # of home, once it has failed for too long
        self._released = released
        self._submitted: dict[int, _Submitted] = {}
        self._towards_home: dict[int, Save] = {}  # durable in the local tier, and to be sent home
        self._sent_again: dict[
            int, HoldfastError | None
        ] = {}  # why a step that was sent later is not in home
        self._arenas_in_use: set[int] = set()
        self._turned_s = 0.0  # time at which the keeper turned to its next save
        self._delayed: Save | None = None  # the last one whose delay was reported
        self._complete: messages.MarkComplete | None = None  # the last one sent
        self._best: tuple[messages.DrainBest, ...] = ()  # the last one sent, after the last one that was due
        self._deletions = deque[messages.DeleteStep](maxlen=_MAX_DELETIONS)
        self._unsaved: deque[messages.TrainerMessage] = deque(maxlen=_MAX_UNSAVED)  # since the last save
        self.start()

    # -- messages to the keeper ------------------------------------------------------------------------------

    def submit(
        self,
        save: Save,
        *,
        arena: int,
        arena_fd: int,
        arenas: Sequence[int],
        layout: messages.ArenaLayout,
        draft: bytes,
        to_home: bool = True,
        metrics: SaveValues = _NO_VALUES,
    ) -> None:
        """Submit a staged save, without blocking.

        Args:
            arenas: all arenas that exist, so that the keeper unmaps the others.
            draft: part of the rank without the facts about its files, see `format.part.draft`.
            metrics: metrics of the checkpoint, on rank 0.
        """
        if type(save.step) is not int or save.step < 0:
            raise InvalidInput(f"A step is an integer of at least 0, got {save.step!r}. Nothing was saved.")
        with self.lock:
            before = tuple(self._unsaved)
            self._unsaved.clear()
            submitted = _Submitted(save, arena, arena_fd, layout, draft, to_home, metrics, before)
            self._submitted[save.step] = submitted
            save.explain_by(lambda: self._describe_wait(submitted))
            self._arenas_in_use.add(arena)
            try:
                self._send_save(submitted, arenas)
            except OSError:
                del self._submitted[save.step]
                self._arenas_in_use.discard(arena)
                raise

    def _send_save(self, submitted: _Submitted, arenas: Sequence[int]) -> None:
        draft_fd = os.memfd_create("holdfast-draft")
        try:
            with open(draft_fd, "wb", closefd=False) as file:
                file.write(submitted.draft)
            message = messages.SubmitSave(
                submitted.save.step,
                submitted.arena,
                tuple(arenas) if len(arenas) <= _MAX_LISTED_ARENAS else (),
                submitted.layout,
                to_home=submitted.to_home,
                is_resent=submitted.save.state == "staged",
                metrics=messages.encode_metrics(submitted.metrics.values),
                of_steps=dict(submitted.metrics.of_steps),
            )
            fds = submitted.arena_fd, draft_fd
            self.child.outbox.send(message, fds, on_sent=submitted.save.mark_staged)
        finally:
            os.close(draft_fd)

    def drop(self, step: int, reason: str) -> None:
        """Refuse a save for all ranks, as this one has no copy of it.

        The save then fails at once on all ranks. Otherwise the others would wait for the part of this one.
        """
        if self.config.world_size > 1:
            self._send_surely(messages.DropSave(step, reason[: messages.MAX_DETAIL]))

    def drain(self, save: Save) -> None:
        """Send a save of this attempt home, whether or not it was due."""
        with self.lock:
            if save.failed is not None or save.is_settled_in_home:
                return
            if self.fenced is not None:
                save.mark_home_failed(self.fenced)
                return
            self._towards_home[save.step] = save
            self.drain_checkpoint(CheckpointId(attempt=self.config.attempt, step=save.step))

    def drain_checkpoint(self, checkpoint: CheckpointId) -> None:
        """Send a checkpoint of the local tier home, of any attempt.

        Raises:
            HoldfastError: the last try to send this step failed, or a newer attempt has claimed the run.
        """
        with self.lock:
            error = self.fenced or self._sent_again.get(checkpoint.step)
            self._sent_again[checkpoint.step] = None
        if error is not None:
            raise error
        self.child.outbox.send(messages.DrainCheckpoint(attempt=checkpoint.attempt, step=checkpoint.step))

    def send_best(self, steps: Sequence[int], *, is_due: bool) -> None:
        """Send the steps of the best saves, which stay in the local folder until they are in home."""
        with self.lock:
            best = messages.DrainBest(tuple(steps), is_due)
            self._best = (*(one for one in self._best if one.is_due and not is_due), best)
            self.child.outbox.send(best)

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step once a newer one is complete."""
        with self.lock:
            message = messages.DeleteStep(step)
            self._deletions.append(message)
            self.child.outbox.send(message)

    def update_metrics(self, step: int, metrics: SaveValues) -> None:
        """Replace the metrics of a save that was submitted before."""
        values = messages.encode_metrics(metrics.values)
        self._send_surely(messages.UpdateMetrics(step, values, dict(metrics.of_steps)))

    def mark_complete(self, checkpoint: CheckpointId) -> None:
        """Notify the keeper that a checkpoint is complete. Its files are in folders of several hosts."""
        with self.lock:
            self._complete = messages.MarkComplete(attempt=checkpoint.attempt, step=checkpoint.step)
            self.child.outbox.send(self._complete)

    def record(
        self,
        event: str,
        *,
        step: int | None,
        num_bytes: int = 0,
        seconds: float = 0.0,
        detail: str = "",
        tier: str = "",
        surely: bool = False,
    ) -> None:
        """Record an event in the history; with `surely`, also if this keeper is killed before that."""
        short = detail[: messages.MAX_DETAIL]
        message = messages.RecordEvent(event, step, time.time(), num_bytes, seconds, short, tier)
        (self._send_surely if surely else self.child.outbox.send)(message)

    def send_metrics(self, steps: list[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Record the values of ascending steps in the history, even if this keeper is killed meanwhile.

        Those sent before a save are recorded before its checkpoint is complete.
        """
        members = {"steps": steps, "values": values}
        self._send_surely(messages.RecordEvent("metrics", max(steps), time.time(), members=members))

    def _send_surely(self, message: messages.TrainerMessage) -> None:
        """Send a message. A new keeper is sent it again, unless a later save is persisted."""
        with self.lock:
            self._unsaved.append(message)
            self.child.outbox.send(message)

    def close(self, timeout_s: float | None = None, *, frees_memory: bool = False) -> None:
        """Let the keeper exit once it has completed everything. It exits by itself in any case.

        Args:
            frees_memory: no later attempt needs the contents of its memory.

        Blocks: until it has exited, or until it has stored everything if it keeps its memory for a later
            attempt; at most `timeout_s`.
        """
        with self.lock:
            _closing.add(self)
            self.send_close(messages.Close(frees_memory), must_restart=bool(self._submitted))
        text = f"the keeper of rank {self.config.rank} (pid {self.pid}) to complete its work"
        if frees_memory:
            with reported_if_slow(lambda: _log.info(f"waiting for {text}")):
                self.wait_ended(timeout_s)
        else:
            limit_s = math.inf if timeout_s is None else timeout_s
            wait_while(lambda: "" if self._has_stored() else text, limit_s, _log.info)

    def _has_stored(self) -> bool:
        """Return True if the keeper has exited, or at most offers its memory."""
        return self.wait_ended(0) or self.is_done

    @override
    def wait_ended(self, timeout_s: float | None) -> bool:
        has_ended = super().wait_ended(timeout_s)
        if has_ended:
            _closing.discard(self)
        return has_ended

    def _describe_wait(self, submitted: _Submitted) -> str:
        """Return the cause and the duration of the wait for a save that is not durable."""
        with self.lock:
            first = next((one for one in self._submitted.values() if not one.is_persisted), submitted)
            since_s = submitted.since_s if submitted.is_persisted else max(first.since_s, self._turned_s)
        since, place = format_duration(time.monotonic() - since_s), self.config.nearest
        if submitted.is_persisted:
            others = "the other ranks' parts or " if self.config.world_size > 1 else ""
            return f"Its files of this rank are in {place}, and have waited {since} for {others}its manifest."
        condition = self.child.condition
        return (
            f"The keeper of rank {self.config.rank} (pid {self.pid}) has had step {first.save.step} for "
            f"{since} and has not finished writing it to {place}{condition and f': the process {condition}'}."
        )

    def _describe_drain(self) -> str:
        """Return why a durable save is not in home yet."""
        return f"The keeper of rank {self.config.rank} (pid {self.pid}) has to send it to {self.config.home}."

    # -- called by the listening thread ----------------------------------------------------------------------

    @override
    def leave(self) -> None:
        if self._submitted:
            steps = ", ".join(map(str, self._submitted))
            _log.warning(
                f"The program ends without close(), and not in `with Checkpointer(...)`: step {steps} is not "
                "durable yet. The keeper completes it in the background; an error would be lost."
            )
        self.send_close(messages.Close(frees_memory=False), must_restart=False)

    @property
    @override
    def expects_replies(self) -> bool:
        return bool(self._submitted or self._towards_home)

    @property
    @override
    def has_undone(self) -> bool:
        return self.expects_replies or bool(self._unsaved)

    @override
    def add_problem(self, text: str) -> None:
        self.problems.append((text, SaveWarning))

    @override
    def release_unused(self) -> None:
        still_read = {one.arena for one in self._submitted.values() if not one.is_persisted}
        for arena in self._arenas_in_use - still_read:
            self._release(arena)

    @override
    def fail_all(self, reason: str | None) -> None:
        for step in list(self._submitted):
            text = reason or (
                f"The keeper of rank {self.config.rank} (pid {self.pid}) exited before it reported the "
                f"outcome of step {step}, which may be complete. Earlier checkpoints remain."
            )
            self._finish(step, RetryLater(text, step=step))
        if reason is not None:
            for arena in list(self._arenas_in_use):
                self._release(arena)

    @override
    def resend(self) -> int:
        for step, submitted in list(self._submitted.items()):
            for message in submitted.before:
                self.child.outbox.send(message)
            if submitted.is_persisted:
                self.child.outbox.send(
                    messages.ResumeCommit(step, submitted.layout.data_bytes, submitted.to_home)
                )
            else:
                self._resend_save(submitted)
        for message in self._unsaved:
            self.child.outbox.send(message)
        for step in self._towards_home:
            self.drain_checkpoint(CheckpointId(attempt=self.config.attempt, step=step))
        for message in (*self._deletions, *self._best, self._complete):
            if message is not None:
                self.child.outbox.send(message)
        return len(self._submitted)

    def _resend_save(self, submitted: _Submitted) -> None:
        submitted.since_s = time.monotonic()
        try:
            # No list of all arenas: in a long queue it would be as long as the queue, in each message.
            self._send_save(submitted, ())
        except OSError as error:  # raised here, it would end the thread that replaces keepers
            step = submitted.save.step
            text = f"Step {step} could not be sent to a new keeper: {error}. Earlier checkpoints remain."
            self._finish(step, RetryLater(text, step=step))

    @override
    def receive(self, message: messages.Message) -> None:
        if isinstance(message, messages.ShowText):  # without the lock: it may be the text about a hang
            _log.log(logging.ERROR if message.must_reply else logging.WARNING, message.text)
            if message.must_reply:
                self.child.outbox.send(messages.TextShown())
            return
        with self.lock:  # nothing is logged under it, as standard error may block, and save() needs it
            match message:
                case messages.SavePersisted(step) if step in self._submitted:
                    submitted = self._submitted[step]
                    submitted.is_persisted, submitted.since_s, submitted.before = True, time.monotonic(), ()
                case messages.SaveDurable(step):
                    self.num_deaths = 0
                    self._finish(step, None)
                case messages.SaveFailed(step):
                    self._fail(message)
                case messages.ArrivedHome(step):
                    self._finish_drains(step)
                case messages.WarnOf(text, is_of_watch):
                    self.problems.append((text, WatchWarning if is_of_watch else SaveWarning))
                case _:
                    pass  # below, or not for a trainer
        if isinstance(message, messages.ArenaReleased):
            self._release(message.arena)
        elif isinstance(message, messages.SaveDelayed):
            self._note_delay(message)

    def _note_delay(self, message: messages.SaveDelayed) -> None:
        submitted = self._submitted.get(message.step)
        if submitted is not None:
            before, self._delayed = self._delayed, submitted.save
            submitted.save.delay = message.detail
            if before is None or before.done() or before.delay != message.detail:  # not for each of a queue
                _log.warning("step %d is not durable yet: %s", message.step, message.detail)

    # -- outcomes --------------------------------------------------------------------------------------------

    def _release(self, arena: int) -> None:
        with self.lock:
            self._turned_s = time.monotonic()
            self._arenas_in_use.discard(arena)
        self._released(arena)

    def _finish(self, step: int, error: HoldfastError | None) -> None:
        submitted = self._submitted.pop(step, None)
        if submitted is None:
            return
        if error is not None:
            submitted.save.mark_failed(error)
            return
        submitted.save.explain_by(self._describe_drain)
        submitted.save.mark_durable()
        if self.config.local is None:
            submitted.save.mark_home()
        elif submitted.to_home:
            self._towards_home[step] = submitted.save

    def _finish_drains(self, newest: int) -> None:
        self.home_lost = None
        # Older ones that were to be sent will not be any more.
        for step in [step for step in self._towards_home if step <= newest]:
            self._towards_home.pop(step).mark_home()

    def _fail(self, message: messages.SaveFailed) -> None:
        step, kind = message.step, ERRORS.get(message.error, RetryLater)
        if not message.in_home:
            error = kind(message.detail, step=step)
            if isinstance(error, Conflict):
                self.fenced = error
                while self._towards_home:  # the newer attempt drains
                    self._towards_home.popitem()[1].mark_home_failed(error)
            self._finish(step, error)
            return
        error = kind(f"Step {step} is not in home: {message.detail}", step=step)
        if isinstance(error, (Denied, RetryLater)):  # for too long; other errors concern this step only
            self.home_lost = error
        elif step not in self._sent_again:
            self.add_problem(str(error))
        if step in self._towards_home:
            self._towards_home.pop(step).mark_home_failed(error)
        if step in self._sent_again:
            self._sent_again[step] = error


_closing: set[Keeper] = set()
"""Closed keepers of this process that may still be running."""


def wait_for_closed(home: str, *, timeout_s: float, notify: Callable[[str], None]) -> None:
    """Wait for the closed keepers of a home in this process. They may be about to commit.

    Blocks: until they have stored everything, at most `timeout_s` each.
    """
    text = "the keeper of an earlier Checkpointer of this process to complete its saves"
    for keeper in [one for one in _closing if one.config.home == home]:
        wait_while(lambda keeper=keeper: "" if keeper._has_stored() else text, timeout_s, notify)
