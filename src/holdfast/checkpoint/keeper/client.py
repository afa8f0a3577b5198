"""Client of a keeper, in the trainer: submits saves, receives their outcomes, and replaces a dead keeper."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final
from weakref import WeakValueDictionary

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.keeper import messages
from holdfast.checkpoint.keeper.child_process import ChildProcess
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.lockfile import wait_while
from holdfast.checkpoint.keeper.save import Save
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
from holdfast.system import backoff
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.process_exit import complete_at_exit
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
_MAX_DEATHS = 5
"""Deaths in a row, without a completed save, after which the saves of the next dead keeper fail."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0
"""Pauses before another keeper is started, from the second death in a row on. Each is twice the last."""
_MAX_DEATHS_WITH_USERS_CODE = 2
"""Deaths in a row, after which a keeper loads only halves of watches that are part of Holdfast."""


class _Submitted(Struct):
    """Save that a new keeper would be sent again."""

    save: Save
    message: messages.SubmitSave
    arena_fd: int
    draft: bytes
    before: tuple[messages.TrainerMessage, ...] = ()  # must be handled before the save is committed
    is_persisted: bool = False
    since_s: float = field(default_factory=time.monotonic)  # in the keeper, or persisted


@final
class Keeper:
    """This rank's keeper, as the trainer sees it. A process that dies or stops is replaced, until `close`.

    Args:
        released: called with the number of each arena that may be used again.
        copied: called with the step of each save that was sent to peers, and whether all of them hold it.
        pulse_fd: descriptor of this process's pulse; -1 without one.
        listener: socket on which the keepers of other hosts call, if it has peers.
    """

    def __init__(
        self,
        config: KeeperConfig,
        *,
        released: Callable[[int], None],
        copied: Callable[[int, bool], None] = lambda *_: None,
        pulse_fd: int = -1,
        listener: socket.socket | None = None,
    ) -> None:
        self.config = config
        self.problems: list[tuple[str, type[Warning]]] = []  # to warn the user of with the next save
        self.fenced: HoldfastError | None = None  # of a save after a newer attempt has claimed the run
        self.home_lost: HoldfastError | None = None  # of home, once it has failed for too long
        self._released, self._copied = released, copied
        self._submitted: dict[int, _Submitted] = {}
        self._towards_home: dict[int, Save] = {}  # durable in the local tier, and to be sent home
        self._sent_again: dict[int, HoldfastError | None] = {}  # why a step sent later is not in home
        self._arenas_in_use: set[int] = set()
        self._turned_s = 0.0  # time at which the keeper turned to its next save
        self._delayed: Save | None = None  # the last one whose delay was reported
        self._complete: messages.MarkComplete | None = None  # the last one sent
        self._best: tuple[messages.DrainBest, ...] = ()  # the last one sent, after the last one that was due
        self._deletions = deque[messages.DeleteStep](maxlen=_MAX_DELETIONS)
        self._unsaved: deque[messages.TrainerMessage] = deque(maxlen=_MAX_UNSAVED)  # since the last save
        self._lock = threading.RLock()  # held while the process is replaced, and to change what is resent
        self._num_deaths = 0  # in a row, without a completed save
        self._child_config, self._pulse_fd, self._listener = config, pulse_fd, listener
        # Sent to them, or waiting for a newer one that is; peers may be away for thousands of saves.
        self._towards_peers = WeakValueDictionary[int, Save]()
        self._copying: int | None = None  # step that was sent to peers
        self._has_warned_of_peers = False  # since the last copy that they hold
        self._close: messages.Close | None = None  # once it was sent
        self._must_not_pause = threading.Event()
        self._has_ended = threading.Event()
        self._has_left = False  # this process ends before the keeper
        try:
            self._child = ChildProcess.start(config, pulse_fd=pulse_fd, listener=listener)
        except OSError as error:
            raise RetryLater(
                f"The keeper of rank {config.rank} could not be started: {error}. Nothing was saved.",
                rank=config.rank,
            ) from error
        self._listen_to(self._child)
        complete_at_exit(self, is_receiver=True)

    @property
    def pid(self) -> int:
        """Process id of the current keeper."""
        return self._child.pid

    @property
    def is_done(self) -> bool:
        """True if everything is stored: what the process still has in memory may be taken over."""
        return self._child.is_done

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
        to_peers: bool = False,
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
        with self._lock:
            before = tuple(self._unsaved)
            self._unsaved.clear()
            message = messages.SubmitSave(
                save.step,
                arena,
                # In a long queue the list would be as long as the queue, in each message.
                tuple(arenas) if len(arenas) <= _MAX_LISTED_ARENAS else (),
                layout,
                to_home=to_home,
                to_peers=to_peers,
                metrics=messages.encode_metrics(metrics.values),
                of_steps=metrics.of_steps,
            )
            submitted = self._submitted[save.step] = _Submitted(save, message, arena_fd, draft, before)
            save.explain_by(lambda: self._describe_wait(submitted))
            self._arenas_in_use.add(arena)
            if self.config.peers is not None:
                save.has_peers, self._towards_peers[save.step] = True, save
                self._copying = save.step if to_peers else self._copying
            try:
                self._send_save(submitted, message)
            except OSError:
                del self._submitted[save.step]
                self._arenas_in_use.discard(arena)
                raise

    def _send_save(self, submitted: _Submitted, message: messages.SubmitSave) -> None:
        draft_fd = os.memfd_create("holdfast-draft")
        try:
            with open(draft_fd, "wb", closefd=False) as file:
                file.write(submitted.draft)
            fds = submitted.arena_fd, draft_fd
            self._child.outbox.send(message, fds, on_sent=submitted.save.mark_staged)
        finally:
            os.close(draft_fd)

    def drop(self, step: int, reason: str) -> None:
        """Refuse a save for all ranks, as this one has no copy of it.

        The save then fails at once on all ranks. Otherwise the others would wait for the part of this one.
        """
        if self.config.world_size > 1:
            self._send_surely(messages.DropSave(step, reason[: messages.MAX_DETAIL]))
        self._copied(step, False)

    def drain(self, save: Save) -> None:
        """Send a save of this attempt home, whether or not it was due."""
        with self._lock:
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
        with self._lock:
            error = self.fenced or self._sent_again.get(checkpoint.step)
            self._sent_again[checkpoint.step] = None
        if error is not None:
            raise error
        self._child.outbox.send(messages.DrainCheckpoint(attempt=checkpoint.attempt, step=checkpoint.step))

    def send_best(self, steps: Sequence[int], *, is_due: bool) -> None:
        """Send the steps of the best saves, which stay in the local folder until they are in home."""
        with self._lock:
            best = messages.DrainBest(tuple(steps), is_due)
            self._best = (*(one for one in self._best if one.is_due and not is_due), best)
            self._child.outbox.send(best)

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step once a newer one is complete."""
        with self._lock:
            message = messages.DeleteStep(step)
            self._deletions.append(message)
            self._child.outbox.send(message)

    def update_metrics(self, step: int, metrics: SaveValues) -> None:
        """Replace the metrics of a save that was submitted before."""
        values = messages.encode_metrics(metrics.values)
        self._send_surely(messages.UpdateMetrics(step, values, dict(metrics.of_steps)))

    def mark_complete(self, checkpoint: CheckpointId) -> None:
        """Notify the keeper that a checkpoint is complete. Its files are in folders of several hosts."""
        with self._lock:
            self._complete = messages.MarkComplete(attempt=checkpoint.attempt, step=checkpoint.step)
            self._child.outbox.send(self._complete)

    def keep_copies(self, steps: Sequence[int]) -> None:
        """Keep the copies of these steps in memory, here and on peers, and no others."""
        self._child.outbox.send(messages.KeepCopies(tuple(steps)))

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
        (self._send_surely if surely else self._child.outbox.send)(message)

    def send_metrics(self, steps: list[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Record the values of ascending steps in the history, even if this keeper is killed meanwhile.

        Those sent before a save are recorded before its checkpoint is complete.
        """
        members = {"steps": steps, "values": values}
        self._send_surely(messages.RecordEvent("metrics", max(steps), time.time(), members=members))

    def _send_surely(self, message: messages.TrainerMessage) -> None:
        """Send a message. A new keeper is sent it again, unless a later save is persisted."""
        with self._lock:
            self._unsaved.append(message)
            self._child.outbox.send(message)

    def close(self, timeout_s: float | None = None, *, frees_memory: bool = False) -> None:
        """Let the keeper exit once it has completed everything. It exits by itself in any case.

        Args:
            frees_memory: no later attempt needs the contents of its memory.

        Blocks: until it has exited, or until it has stored everything if it keeps its memory for a later
            attempt; at most `timeout_s`.
        """
        with self._lock:
            _closing.add(self)
            self._send_close(frees_memory=frees_memory, must_restart=bool(self._submitted))
        text = f"the keeper of rank {self.config.rank} (pid {self.pid}) to complete its work"
        if frees_memory:
            with reported_if_slow(lambda: _log.info(f"waiting for {text}")):
                self.wait_ended(timeout_s)
        else:
            limit_s = math.inf if timeout_s is None else timeout_s
            wait_while(lambda: "" if self._has_stored() else text, limit_s, _log.info)

    def _send_close(self, *, frees_memory: bool, must_restart: bool) -> None:
        """Let the keeper exit once it has completed everything. `must_restart` even if it has died."""
        self._close = messages.Close(frees_memory)
        self._child.outbox.send(self._close)
        if not must_restart:
            self._must_not_pause.set()

    def _has_stored(self) -> bool:
        """Return True if the keeper has exited, or at most offers its memory."""
        return self.wait_ended(0) or self.is_done

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait for the exit of the last process, after its close. Return False if the time runs out."""
        has_ended = self._has_ended.wait(timeout_s)
        if has_ended:
            _closing.discard(self)
        return has_ended

    def end_with_interpreter(self, timeout_s: float) -> None:
        """Send what is queued, and join the thread. The keeper completes its work, and exits by itself."""
        with self._lock:
            if not self._has_ended.is_set() and self._close is None:
                if self._submitted:
                    steps = ", ".join(map(str, self._submitted))
                    _log.warning(
                        "The program ends without close(), and not in `with Checkpointer(...)`: step "
                        f"{steps} is not durable yet. The keeper completes it in the background; an error "
                        "would be lost."
                    )
                self._send_close(frees_memory=False, must_restart=False)
        self._child.outbox.flush(timeout_s)
        self._has_left = True
        self._must_not_pause.set()
        with contextlib.suppress(OSError):  # closed, or the keeper has died
            self._child.end.shutdown(socket.SHUT_RD)  # wakes the thread
        self._thread.join(timeout_s)

    def _describe_wait(self, submitted: _Submitted) -> str:
        """Return the cause and the duration of the wait for a save that is not durable."""
        with self._lock:
            first = next((one for one in self._submitted.values() if not one.is_persisted), submitted)
            since_s = submitted.since_s if submitted.is_persisted else max(first.since_s, self._turned_s)
        since, place = format_duration(time.monotonic() - since_s), self.config.nearest
        if submitted.is_persisted:
            others = "the other ranks' parts or " if self.config.world_size > 1 else ""
            return f"Its files of this rank are in {place}, and have waited {since} for {others}its manifest."
        condition = self._child.condition
        return (
            f"The keeper of rank {self.config.rank} (pid {self.pid}) has had step {first.save.step} for "
            f"{since} and has not finished writing it to {place}{condition and f': the process {condition}'}."
        )

    def _describe_drain(self) -> str:
        """Return why a durable save is not in home yet."""
        return f"The keeper of rank {self.config.rank} (pid {self.pid}) has to send it to {self.config.home}."

    # -- the thread that listens, and replaces a dead keeper -------------------------------------------------
    def _listen_to(self, child: ChildProcess) -> None:
        self._child = child
        self._thread = threading.Thread(
            target=self._listen, args=(child,), name="holdfast-listen", daemon=True
        )
        self._thread.start()

    def _listen(self, child: ChildProcess) -> None:
        """Receive a keeper's messages until it has died or is silent, and replace it."""
        silence = child.listen(self._receive, lambda: self._expects_replies or self._close is not None)
        if self._has_left:
            child.outbox.close()
            return
        self._replace(child, f"The keeper of rank {self.config.rank} (pid {child.pid}) {child.reap(silence)}")

    @property
    def _expects_replies(self) -> bool:
        """True if the keeper has work, so that a silent one is replaced."""
        return bool(self._submitted or self._towards_home)

    def _replace(self, dead: ChildProcess, death: str) -> None:
        """Start another keeper, and send it everything that the dead one may not have done."""
        reason = death
        while True:
            with self._lock:
                # After its close a keeper exits by itself; if it fails, it may not have done everything.
                has_undone = self._expects_replies or bool(self._unsaved)
                is_lost = dead.has_failed and has_undone and self._num_deaths < _MAX_DEATHS
                if self._close is not None and not is_lost:
                    for step in list(self._submitted):
                        text = (
                            f"{death} It had not reported the outcome of step {step}, which may be complete. "
                            "Earlier checkpoints remain."
                        )
                        self._finish(step, RetryLater(text, step=step))
                    self._has_ended.set()
                    return
                pause_s = self._count_death(reason, is_final=dead.is_other_version)
            self._must_not_pause.wait(pause_s)
            if self._has_left:
                return
            try:
                child = ChildProcess.start(
                    self._trusted_config(), pulse_fd=self._pulse_fd, listener=self._listener
                )
            except (OSError, HoldfastError) as error:
                reason = f"{death} No other keeper could be started ({error})."
                continue
            with self._lock:
                self._listen_to(child)
                num_saves = self._resend()
                if self._copying is not None and self._copying not in self._submitted:
                    self._end_copy(self._copying, f"Step {self._copying} has no copy: its keeper has died.")
                if self._close is not None:
                    child.outbox.send(self._close)
                self._add_problem(
                    f"{reason} Another one (pid {child.pid}) has taken over its {num_saves} unfinished saves."
                )
            return

    def _trusted_config(self) -> KeeperConfig:
        """Return the configuration of the next keeper; after two deaths in a row without the users' code."""
        watches = self._child_config.watches
        trusted = tuple(one for one in watches if one.keeper.startswith("holdfast."))
        left_out = [one.name for one in watches if one not in trusted]
        if left_out and self._num_deaths >= _MAX_DEATHS_WITH_USERS_CODE:
            self._child_config = replace(self._child_config, watches=trusted)
            with self._lock:
                self._add_problem(
                    f"The keeper of rank {self.config.rank} has died {self._num_deaths} times in a row. The "
                    f"next one works without the halves of these watches: {', '.join(left_out)}."
                )
        return self._child_config

    def _count_death(self, reason: str, *, is_final: bool) -> float:
        """Return the seconds to wait before another keeper is started. If `is_final`, its saves fail now."""
        self._num_deaths += 1
        still_read = {one.message.arena for one in self._submitted.values() if not one.is_persisted}
        for arena in self._arenas_in_use - still_read:
            self._release(arena)
        if self._num_deaths == 1 and not is_final:
            return 0.0
        pause_s = backoff.doubled(self._num_deaths - 1, _FIRST_PAUSE_S, _LAST_PAUSE_S)
        if self._num_deaths > _MAX_DEATHS or is_final:  # one of the saves may be the cause
            text = (
                f"{reason} It was number {self._num_deaths} in a row; the saves that it had are given up, "
                f"and another one is started in {format_duration(pause_s)}. Earlier checkpoints remain."
            )
            for step in list(self._submitted):
                self._finish(step, RetryLater(text, step=step))
            for arena in list(self._arenas_in_use):
                self._release(arena)
        return pause_s

    def _add_problem(self, text: str) -> None:
        self.problems.append((text, SaveWarning))

    def _resend(self) -> int:
        """Send a new keeper everything that a dead one may not have done; return the number of saves."""
        outbox = self._child.outbox
        for step, submitted in list(self._submitted.items()):
            for message in submitted.before:
                outbox.send(message)
            if submitted.is_persisted:
                request = submitted.message
                outbox.send(messages.ResumeCommit(step, request.layout.data_bytes, request.to_home))
            else:
                self._resend_save(submitted)
        for message in self._unsaved:
            outbox.send(message)
        for step in self._towards_home:
            self.drain_checkpoint(CheckpointId(attempt=self.config.attempt, step=step))
        for message in (*self._deletions, *self._best, self._complete):
            if message is not None:
                outbox.send(message)
        return len(self._submitted)

    def _resend_save(self, submitted: _Submitted) -> None:
        submitted.since_s = time.monotonic()
        try:
            is_resent = submitted.save.state == "staged"
            self._send_save(submitted, replace(submitted.message, arenas=(), is_resent=is_resent))
        except OSError as error:  # raised here, it would end the thread that replaces keepers
            step = submitted.save.step
            text = f"Step {step} could not be sent to a new keeper: {error}. Earlier checkpoints remain."
            self._finish(step, RetryLater(text, step=step))

    def _receive(self, message: messages.Message) -> None:
        if isinstance(message, messages.ShowText):  # without the lock: it may be the text about a hang
            _log.log(logging.ERROR if message.must_reply else logging.WARNING, message.text)
            if message.must_reply:
                self._child.outbox.send(messages.TextShown())
            return
        with self._lock:  # nothing is logged under it, as standard error may block, and save() needs it
            match message:
                case messages.SaveReached(step, "persisted") if step in self._submitted:
                    submitted = self._submitted[step]
                    submitted.is_persisted, submitted.since_s, submitted.before = True, time.monotonic(), ()
                case messages.SaveReached(step, "durable"):
                    self._num_deaths = 0
                    self._finish(step, None)
                case messages.SaveFailed(step):
                    self._fail(message)
                case messages.SaveReached(step, "in home"):
                    self._finish_drains(step)
                case messages.WarnOf(text, is_of_watch):
                    self.problems.append((text, WatchWarning if is_of_watch else SaveWarning))
                case _:
                    pass  # below, or not for a trainer
        self._receive_other(message)

    def _receive_other(self, message: messages.Message) -> None:
        if isinstance(message, messages.ArenaReleased):
            self._release(message.arena)
        elif isinstance(message, messages.SaveDelayed):
            self._note_delay(message)
        elif isinstance(message, messages.CopyEnded):
            self._end_copy(message.step, message.failure)

    def _note_delay(self, message: messages.SaveDelayed) -> None:
        submitted = self._submitted.get(message.step)
        if submitted is not None:
            before, self._delayed = self._delayed, submitted.save
            submitted.save.delay = message.detail
            if before is None or before.done() or before.delay != message.detail:  # not for each of a queue
                _log.warning("step %d is not durable yet: %s", message.step, message.detail)

    # -- outcomes --------------------------------------------------------------------------------------------
    def _release(self, arena: int) -> None:
        with self._lock:
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
        elif submitted.message.to_home:
            self._towards_home[step] = submitted.save

    def _end_copy(self, step: int, failure: str = "") -> None:
        """Settle the copies of a save on peers, and with them those of older saves."""
        with self._lock:
            if not failure:
                for older, save in list(self._towards_peers.items()):
                    if older <= step:
                        del self._towards_peers[older]
                        save.mark_mirrored()
            elif not self._has_warned_of_peers:
                self._add_problem(f"{failure} Training continues, and the next save is sent.")
            self._has_warned_of_peers = bool(failure)
            if self._copying == step:
                self._copying = None
                self._copied(step, not failure)

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
            self._add_problem(str(error))
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
