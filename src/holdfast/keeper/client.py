"""The trainer's side of a keeper: starts and replaces it, hands saves over, hears what became of them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast import backoff, errors
from holdfast.entry import command
from holdfast.errors import HoldfastError, RetryLater
from holdfast.format.run import encode_metric
from holdfast.keeper import protocol
from holdfast.keeper.config import IGNORED_SIGNALS, KeeperConfig
from holdfast.keeper.outbox import Outbox
from holdfast.keeper.presence import Presence, Trace, process_start
from holdfast.keeper.protocol import MAX_DETAIL, Message
from holdfast.keeper.save import Save
from holdfast.units import format_duration

_MAX_DEATHS = 5
"""Keepers that may die in a row without completing a save before the saves that they were sent are failed."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0
"""Pauses before another keeper is started, from the second death in a row on; each doubles."""
_LOOK_S = 1.0  # between two looks whether the keeper answers
_SILENT_LOOKS = 20  # in a row without an answer, after which it is replaced
_REAP_S = 5.0  # how long a killed keeper may take to end
_MAX_UNSAVED = 64
"""Notes since the last save that a keeper's successor is told again; older ones have long been written."""


@dataclass(frozen=True, slots=True)
class Images:
    """Where in an arena the images of a save's files are; the members are those of the message."""

    bytes: int  # of the data file, which begins at 0
    frozen_at: int = 0
    frozen_bytes: int = 0  # of the file of frozen tensors; 0 if there is none
    is_frozen_unchanged: bool = False  # it was copied in the belief that it equals the save's before


@dataclass(slots=True)
class _Pending:
    """A save that a successor of the keeper would have to be told again."""

    save: Save
    arena: int
    arena_fd: int
    images: Images
    draft: bytes
    to_home: bool
    metrics: Mapping[str, float]
    notes: tuple[Message, ...] = ()  # that have to be written before it is
    persisted: bool = False


@dataclass(frozen=True, slots=True)
class _Started:
    """A keeper process, and the ways to it."""

    process: subprocess.Popen[bytes]
    end: socket.socket
    outbox: Outbox
    stderr: int
    trace: Path


class Keeper:
    """The keeper process of this rank, as the trainer sees it.

    Args:
        terms: which run, attempt and rank it serves.
        released: told the number of each arena that may be used again.
    """

    def __init__(self, terms: KeeperConfig, *, released: Callable[[int], None]) -> None:
        self.terms = terms
        self.problems: list[str] = []  # what the next save has to tell the user
        self.fenced: HoldfastError | None = None
        self.home_lost: HoldfastError | None = None  # home has failed for longer than is allowed
        self._released = released
        self._lock = threading.RLock()
        self._pending: dict[int, _Pending] = {}
        self._towards_home: dict[int, Save] = {}  # committed nearby, wanted in home
        self._held: set[int] = set()  # arenas that the keeper still reads
        self._complete: tuple[int, int] | None = None  # what was told last
        self._best: list[int] = []  # steps of the best saves, as they were sent last
        self._unsaved: deque[Message] = deque(maxlen=_MAX_UNSAVED)  # notes since the last save
        self._closing = False
        self._goodbye = False
        self._woken = threading.Event()  # it is closing: no other keeper need be started
        self._ended = threading.Event()  # the last keeper has ended, or was left to the system
        self._deaths = 0
        try:
            self._adopt(self._start())
        except OSError as error:
            message = f"The keeper of rank {terms.rank} could not be started: {error}. Nothing was saved."
            raise RetryLater(message, rank=terms.rank) from error

    @property
    def pid(self) -> int:
        """Process id of the keeper that serves now."""
        return self._keeper.process.pid

    # -- handing over ----------------------------------------------------------------------------------------

    def submit(
        self,
        save: Save,
        *,
        arena: int,
        arena_fd: int,
        arenas: list[int],
        images: Images,
        draft: bytes,
        to_home: bool = True,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Hand a staged save over.

        Args:
            arenas: all arenas that still exist, so that the keeper can let go of the others.
            images: where in the arena the files are.
            draft: the rank's part without its file facts, see `format.part.draft`.
            to_home: drain it, if there is a nearer tier.
            metrics: of the checkpoint, on rank 0.
        """
        with self._lock:
            notes = tuple(self._unsaved)
            self._unsaved.clear()
            pending = _Pending(save, arena, arena_fd, images, draft, to_home, metrics, notes)
            self._pending[save.step] = pending
            self._held.add(arena)
            self._send_save(pending, arenas)

    def _send_save(self, pending: _Pending, arenas: list[int], *, again: bool = False) -> None:
        draft_fd = os.memfd_create("holdfast-draft")
        try:
            with open(draft_fd, "wb", closefd=False) as file:
                file.write(pending.draft)
            message: Message = {
                "op": "save",
                "step": pending.save.step,
                "arena": pending.arena,
                "arenas": arenas,
                "to_home": pending.to_home,
                "again": again,
                "metrics": _encode_metrics(pending.metrics),
                **asdict(pending.images),
            }
            self._keeper.outbox.send(message, (pending.arena_fd, draft_fd), sent=pending.save.mark_staged)
        finally:
            os.close(draft_fd)

    def drain(self, save: Save) -> None:
        """Have a save of this attempt brought home, whether or not it was due."""
        with self._lock:
            if save.failed is not None or save.is_settled_in_home:
                return
            self._towards_home[save.step] = save
            self.drain_other(self.terms.attempt, save.step)

    def drain_other(self, attempt: int, step: int) -> None:
        """Have a checkpoint of the near tier brought home that another attempt has made."""
        self._send({"op": "drain", "attempt": attempt, "step": step})

    def tell_complete(self, attempt: int, step: int) -> None:
        """Have the keeper know that a checkpoint is complete whose files are in folders of several hosts."""
        with self._lock:
            self._complete = attempt, step
            self._send({"op": "known", "attempt": attempt, "step": step})

    def send_best(self, steps: list[int]) -> None:
        """Send the steps of this attempt's best saves, which have to come home."""
        with self._lock:
            self._best = steps
            self._send({"op": "best", "steps": steps})

    def note(
        self,
        event: str,
        *,
        step: int | None,
        num_bytes: int = 0,
        seconds: float = 0.0,
        detail: str = "",
        tier: str = "",
    ) -> None:
        """Have an event of the trainer's written into the run's history."""
        self._send(_note(event, step, num_bytes, seconds, detail[:MAX_DETAIL], tier))

    def drop(self, step: int, reason: str) -> None:
        """Refuse a save for all ranks, since this one has no copy of it.

        The saves of the other ranks fail at once then; else they would wait for the part of this rank.
        """
        if self.terms.world_size > 1:
            self._tell_surely({"op": "drop", "step": step, "detail": reason[:MAX_DETAIL]})

    def note_restored(self, *, step: int, num_bytes: int, seconds: float, detail: str, tier: str) -> None:
        """Have the history tell from where this attempt goes on, also if this keeper is killed meanwhile."""
        self._tell_surely(_note("restored", step, num_bytes, seconds, detail[:MAX_DETAIL], tier))

    def tell_metrics(self, steps: list[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Have the history tell numbers of training, also if this keeper is killed meanwhile.

        What was told before a save is written before its checkpoint is complete.

        Args:
            steps: that they are about, in order.
            values: of each step, by name.
        """
        self._tell_surely({**_note("metrics", max(steps)), "members": {"steps": steps, "values": values}})

    def update_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the metrics of a save that was submitted before."""
        self._tell_surely({"op": "metrics", "step": step, "metrics": _encode_metrics(metrics)})

    def _tell_surely(self, message: Message) -> None:
        """Send something that a successor is told again, unless a save that came after it is persisted."""
        with self._lock:
            self._unsaved.append(message)
            self._send(message)

    def _send(self, message: Message) -> None:
        # A keeper that is gone is noticed by the listener, which sends its successor all that is pending.
        self._keeper.outbox.send(message)

    # -- the process -----------------------------------------------------------------------------------------

    def _start(self) -> _Started:
        """Start a keeper, which is not yet sent anything but its terms.

        Raises:
            OSError: the system refused a process or a descriptor.
            Denied, RetryLater: the folder for its trace cannot be used.
        """
        presence = Presence.claim(self.terms.home, self._trace())
        ours, theirs = protocol.pair()
        stderr = os.memfd_create("holdfast-keeper-stderr")  # read if it dies; leaves no file behind
        # A process inherits its maker's mask: blocked here, they cannot end the keeper before it ignores
        # them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            process = subprocess.Popen(
                command("holdfast.keeper", str(theirs.fileno()), str(presence.fd), str(presence.path)),
                cwd="/",  # hold nobody's directory
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(theirs.fileno(), presence.fd),
                start_new_session=True,  # Ctrl-C and SIGTERM to the trainer's process group do not reach it
            )
        except OSError:
            presence.path.unlink(missing_ok=True)
            os.close(stderr)
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
            presence.let_go()
        outbox = Outbox(ours)
        outbox.send({"terms": self.terms.text()})
        return _Started(process, ours, outbox, stderr, presence.path)

    def _adopt(self, keeper: _Started) -> None:
        """Use a keeper that was just started."""
        self._keeper = keeper
        listener = threading.Thread(target=self._listen, args=(keeper,), name="holdfast-listen", daemon=True)
        listener.start()

    def _trace(self) -> Trace:
        pid = os.getpid()
        # Busy until it says otherwise: what we send it while it starts is its work already.
        return Trace(self.terms.attempt, self.terms.rank, pid, process_start(pid) or 0, busy=True)

    def _listen(self, keeper: _Started) -> None:
        """Take a keeper's answers until it has ended or does not answer any more, and start another one."""
        is_silent = self._take_events(keeper)
        if is_silent:
            keeper.process.kill()  # also where it is stopped or frozen: it runs no instruction any more
        told = self._bury(keeper, is_silent=is_silent)
        self._replace(told)

    def _take_events(self, keeper: _Started) -> bool:
        """Return True when the keeper has not answered for too long, False when it has ended."""
        answers, num_looks = select.poll(), 0
        answers.register(keeper.end, select.POLLIN)
        while num_looks < _SILENT_LOOKS:
            # Looks are counted and no clock is read: this process may have been stopped itself.
            if answers.poll(_LOOK_S * 1000):
                message, _ = protocol.receive(keeper.end)
                if message is None:
                    return False
                num_looks = 0
                if message["event"] != "pong":
                    self._on_event(message)
            elif self._pending or self._towards_home or self._closing or keeper.outbox:
                num_looks += 1
                if not keeper.outbox:
                    keeper.outbox.send({"op": "ping"})
        return True

    def _bury(self, keeper: _Started, *, is_silent: bool) -> str:
        """Let go of a keeper that has ended or was killed, and return what happened to it."""
        pid = keeper.process.pid
        keeper.outbox.close()
        try:
            status = keeper.process.wait(_REAP_S)
            why = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:  # frozen by its control group: it ends before it runs again
            keeper.process.kill()
            keeper.trace.unlink(missing_ok=True)  # nobody need wait for it
            why = "killed, and not yet ended"
        said = os.pread(keeper.stderr, 4000, max(0, os.fstat(keeper.stderr).st_size - 4000))
        os.close(keeper.stderr)
        keeper.end.close()
        if is_silent:
            limit = format_duration(_SILENT_LOOKS * _LOOK_S)
            return (
                f"The keeper of rank {self.terms.rank} (pid {pid}) did not answer for {limit}, as if it were "
                "stopped or frozen, and was killed."
            )
        told = f"The keeper of rank {self.terms.rank} (pid {pid}) died ({why})."
        words = said.decode(errors="replace").strip()
        return f"{told} Its last words: {words}" if words else told

    def _forsake(self) -> None:
        """Fail what the keeper did not report before it ended after `close`."""
        for pending in list(self._pending.values()):
            message = (
                f"The keeper of rank {self.terms.rank} (pid {self.pid}) ended before it told what became of "
                "step "
                f"{pending.save.step}; it may be complete. Earlier checkpoints stand."
            )
            self._finish(pending.save.step, RetryLater(message, step=pending.save.step))
        self._ended.set()

    def _replace(self, told: str) -> None:
        """Start another keeper in place of one that is gone, and send it all that is pending."""
        while True:
            with self._lock:
                if self._closing:
                    self._forsake()
                    return
                pause_s = self._note_death(told)
            self._woken.wait(pause_s)
            try:
                keeper = self._start()
            except (OSError, HoldfastError) as error:
                told = f"{told.partition(' No other could')[0]} No other could be started ({error})."
                continue
            with self._lock:
                self._adopt(keeper)
                self._tell_all_pending()
                if self._closing:
                    self._send({"op": "close", "goodbye": self._goodbye})
                self.problems.append(
                    f"{told} Another one (pid {self.pid}) has taken over its {len(self._pending)} unfinished "
                    "saves."
                )
            return

    def _note_death(self, told: str) -> float:
        """Count a death, and return the seconds to wait before another keeper is started."""
        self._deaths += 1
        still_read = {pending.arena for pending in self._pending.values() if not pending.persisted}
        for arena in self._held - still_read:  # it died before it could say so
            self._release(arena)
        if self._deaths == 1:
            return 0.0
        pause_s = backoff.doubled(self._deaths - 1, _FIRST_PAUSE_S, _LAST_PAUSE_S)
        if self._deaths > _MAX_DEATHS:  # one of the saves may be the reason
            message = (
                f"{told} It was the {self._deaths}th in a row; the saves that it had are given up, and "
                f"another one is started in {format_duration(pause_s)}. Earlier checkpoints stand."
            )
            for pending in list(self._pending.values()):
                self._finish(pending.save.step, RetryLater(message, step=pending.save.step))
            for arena in list(self._held):
                self._release(arena)
        return pause_s

    def _tell_all_pending(self) -> None:
        """Have a new keeper know what the one before may not have done."""
        arenas = [pending.arena for pending in self._pending.values()]
        for pending in self._pending.values():
            for message in pending.notes:
                self._send(message)
            if pending.persisted:
                self._send({"op": "commit", "step": pending.save.step})
            else:
                self._send_save(pending, arenas, again=True)
        for message in self._unsaved:
            self._send(message)
        for step in self._towards_home:
            self.drain_other(self.terms.attempt, step)
        if self._best:
            self.send_best(self._best)
        if self._complete is not None:
            self.tell_complete(*self._complete)

    # -- what became of them ---------------------------------------------------------------------------------

    def _on_event(self, message: Message) -> None:
        event = message["event"]
        if event == "released":
            self._release(message["arena"])
            return
        step = message["step"]
        with self._lock:
            if message.get("history_trouble"):
                self.problems.append(f"The run's history could not be written: {message['history_trouble']}")
            if event == "persisted" and step in self._pending:
                self._pending[step].persisted = True
                self._pending[step].notes = ()
            elif event in ("committed", "kept"):
                self._deaths = 0
                self._finish(step, None)
            elif event == "drained":
                self.home_lost = None
                self._arrived(step)
            elif event == "drain-failed":
                self._on_drain_failed(message)
            elif event == "retain-failed":
                self.problems.append(f"Old checkpoints could not be deleted: {message['detail']}")
            elif event in ("failed", "fenced"):
                error = _error_class(message["kind"])(message["detail"], step=step)
                if event == "fenced":
                    self.fenced = error
                self._finish(step, error)

    def _release(self, arena: int) -> None:
        with self._lock:
            self._held.discard(arena)
        self._released(arena)

    def _finish(self, step: int, error: HoldfastError | None) -> None:
        pending = self._pending.pop(step, None)
        if pending is None:
            return
        if error is None:
            pending.save.mark_durable()
            if self.terms.local is None:
                pending.save.mark_home()
            elif pending.to_home:
                self._towards_home[step] = pending.save
        else:
            pending.save.mark_failed(error)

    def _arrived(self, step: int) -> None:
        """A checkpoint is in home; older ones that were on their way will not be any more."""
        for one in [one for one in self._towards_home if one <= step]:
            self._towards_home.pop(one).mark_home()

    def _on_drain_failed(self, message: Message) -> None:
        step, detail = message["step"], message["detail"]
        if not message["kind"]:
            self.problems.append(f"Home is not reached; training goes on, and it is tried again: {detail}")
            return
        error = _error_class(message["kind"])(f"Step {step} is not in home: {detail}", step=step)
        if isinstance(error, RetryLater):  # home has failed for too long; else it is about this step alone
            self.home_lost = error
        else:
            self.problems.append(str(error))
        if step in self._towards_home:
            self._towards_home.pop(step).mark_home_failed(error)

    def close(self, timeout_s: float | None = None, *, goodbye: bool = False) -> None:
        """Let the keeper end, which it does when all it was handed is done.

        Args:
            timeout_s: how long to wait for that.
            goodbye: nobody will want what is in its memory.

        Blocks: until it has ended, at most `timeout_s`; it ends by itself in any case.
        """
        with self._lock:
            self._closing, self._goodbye = True, goodbye
            _let_go[self.pid] = self
            self._send({"op": "close", "goodbye": goodbye})
            if not self._pending:
                self._woken.set()
        self.wait_ended(timeout_s)

    def wait_ended(self, timeout_s: float | None) -> None:
        """Wait until the process that was let go has ended, at most `timeout_s`."""
        if self._ended.wait(timeout_s):
            for pid in [pid for pid, keeper in _let_go.items() if keeper is self]:
                _let_go.pop(pid, None)


def _note(
    event: str,
    step: int | None,
    num_bytes: int = 0,
    seconds: float = 0.0,
    detail: str = "",
    tier: str = "",
) -> Message:
    return {
        "op": "note",
        "t": time.time(),
        "event": event,
        "step": step,
        "bytes": num_bytes,
        "seconds": seconds,
        "detail": detail,
        "tier": tier,
    }


def _encode_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: encode_metric(value) for name, value in metrics.items()}


_let_go: dict[int, Keeper] = {}
"""Keepers of this process, by pid, that may still be at work although nobody hands them anything any more."""


def wait_for_let_go(home: str, *, timeout_s: float) -> None:
    """Wait for the keepers of `home` that this process has let go: they may be about to commit.

    Blocks: until they have ended, at most `timeout_s` each.
    """
    for keeper in list(_let_go.values()):
        if keeper.terms.home == home:
            keeper.wait_ended(timeout_s)


def _error_class(name: str) -> type[HoldfastError]:
    """Return the class of errors with a name; RetryLater if there is none."""
    found = vars(errors).get(name)
    return found if isinstance(found, type) and issubclass(found, HoldfastError) else RetryLater
