"""Supervisor of a keeper process: starts it, detects that it is dead or stopped, and replaces it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from abc import ABC, abstractmethod

from holdfast.checkpoint.keeper import packets
from holdfast.checkpoint.keeper.child_process import ChildProcess
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.messages import Close, Message, Ping, Pong
from holdfast.errors import HoldfastError, RetryLater
from holdfast.system import backoff
from holdfast.system.process_exit import complete_at_exit
from holdfast.system.units import format_duration

_MAX_DEATHS = 5
"""Deaths in a row, without a completed save, after which the saves of the next dead keeper fail."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0
"""Pauses before another keeper is started, from the second death in a row on. Each is twice the last."""
_CHECK_S = 1.0
"""Pause between two checks whether the keeper responds."""
_MAX_DEATHS_WITH_USERS_CODE = 2
"""Deaths in a row, after which a keeper loads only halves of watches that are part of Holdfast."""
_MAX_SILENT_CHECKS = 20
"""Checks in a row without a response, after which a keeper is replaced."""
_MAX_START_CHECKS = 300
"""The same before its first response: on a busy machine or a slow disk, Python itself may start slowly.

A process that stands still does not start, so checks at which it does are limited as later ones are.
"""


class SupervisedKeeper(ABC):
    """Keeper process that is replaced when it dies or stops, until it is closed.

    The abstract methods are called in the thread that listens to it, most with the lock held.
    """

    def __init__(self, config: KeeperConfig, *, pulse_fd: int = -1) -> None:
        self.config = config
        self.lock = threading.RLock()  # held while the process is replaced, and to change what is resent
        self.num_deaths = 0  # in a row, without a completed save
        self._child_config = config
        self._pulse_fd = pulse_fd  # descriptor of this process's pulse; -1 without one
        self._close: Close | None = None
        self._must_not_pause = threading.Event()
        self._has_ended = threading.Event()
        self._has_left = False  # this process ends before the keeper
        self._thread: threading.Thread | None = None
        try:
            self.child = ChildProcess.start(config, pulse_fd=pulse_fd)
        except OSError as error:
            raise RetryLater(
                f"The keeper of rank {config.rank} could not be started: {error}. Nothing was saved.",
                rank=config.rank,
            ) from error

    @abstractmethod
    def receive(self, message: Message) -> None:
        """Handle a message of the keeper. The lock is not held."""

    @property
    @abstractmethod
    def expects_replies(self) -> bool:
        """True if the keeper has work, so that a silent one is replaced."""

    @property
    @abstractmethod
    def has_undone(self) -> bool:
        """True if a keeper that is killed now leaves work undone, or messages unread."""

    @abstractmethod
    def leave(self) -> None:
        """Send the keeper what it needs to complete its work without this process."""

    @abstractmethod
    def release_unused(self) -> None:
        """Release the arenas that the dead keeper had read, but not released."""

    @abstractmethod
    def resend(self) -> int:
        """Send a new keeper everything that a dead one may not have done; return the number of saves."""

    @abstractmethod
    def fail_all(self, reason: str | None) -> None:
        """Fail all saves without an outcome, for a reason; None if the keeper has exited after its close."""

    @abstractmethod
    def add_problem(self, text: str) -> None:
        """Report a problem to the user with the next save."""

    @property
    def pid(self) -> int:
        """Process id of the current keeper."""
        return self.child.pid

    @property
    def is_done(self) -> bool:
        """True if everything is stored: what the process still has in memory may be taken over."""
        return self.child.is_done

    def send_close(self, message: Close, *, must_restart: bool) -> None:
        """Let the keeper exit once it has completed everything. `must_restart` even if it has died."""
        with self.lock:
            self._close = message
            self.child.outbox.send(message)
            if not must_restart:
                self._must_not_pause.set()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait for the exit of the last process, after its close. Return False if the time runs out."""
        return self._has_ended.wait(timeout_s)

    def end_with_interpreter(self, timeout_s: float) -> None:
        """Send what is queued, and join the thread. The keeper completes its work, and exits by itself."""
        with self.lock:
            if not self._has_ended.is_set() and self._close is None:
                self.leave()
        self.child.outbox.flush(timeout_s)
        self._has_left = True
        self._must_not_pause.set()
        with contextlib.suppress(OSError):  # closed, or the keeper has died
            self.child.end.shutdown(socket.SHUT_RD)  # wakes the thread
        if self._thread is not None:
            self._thread.join(timeout_s)

    def start(self) -> None:
        """Start to receive messages."""
        self._listen_to(self.child)
        complete_at_exit(self, is_receiver=True)

    # -- the thread ------------------------------------------------------------------------------------------

    def _listen_to(self, child: ChildProcess) -> None:
        self.child = child
        self._thread = threading.Thread(
            target=self._listen, args=(child,), name="holdfast-listen", daemon=True
        )
        self._thread.start()

    def _listen(self, child: ChildProcess) -> None:
        """Receive a keeper's messages until it has died or is silent, and replace it."""
        num_checks = self._receive_all(child)
        if self._has_left:
            child.outbox.close()
            return
        if num_checks:
            child.kill()
        death = child.reap()
        if num_checks:
            limit = format_duration(num_checks * _CHECK_S)
            death = f"did not answer for {limit}, as if it were stopped or frozen, and was killed."
        self._replace(child, f"The keeper of rank {self.config.rank} (pid {child.pid}) {death}")

    def _receive_all(self, child: ChildProcess) -> int:
        """Handle messages until the keeper dies or is silent for too long.

        Returns:
            Number of checks without a response; 0 if it has died.
        """
        poll, num_checks, num_still, has_responded = select.poll(), 0, 0, False
        poll.register(child.end, select.POLLIN)
        while num_checks < _MAX_START_CHECKS and num_still < _MAX_SILENT_CHECKS:
            # Counts checks instead of reading a clock, as this process may have been stopped itself.
            if poll.poll(_CHECK_S * 1000):
                message, _ = packets.receive(child.end)
                if message is None:
                    return 0
                num_checks, num_still, has_responded = 0, 0, True
                if not isinstance(message, Pong):
                    self.receive(message)
            elif self.expects_replies or self._close is not None or child.outbox:
                num_checks += 1
                num_still = 0 if not has_responded and child.is_running else num_still + 1
                if not child.outbox:
                    child.outbox.send(Ping())
        return num_checks

    def _replace(self, dead: ChildProcess, death: str) -> None:
        """Start another keeper, and send it everything that the dead one may not have done."""
        reason = death
        while True:
            with self.lock:
                # After its close a keeper exits by itself; one that was killed may not have read everything.
                is_lost = dead.was_killed and self.has_undone and self.num_deaths < _MAX_DEATHS
                if self._close is not None and not is_lost:
                    self.fail_all(None)
                    self._has_ended.set()
                    return
                pause_s = self._count_death(reason)
            self._must_not_pause.wait(pause_s)
            if self._has_left:
                return
            try:
                child = ChildProcess.start(self._trusted_config(), pulse_fd=self._pulse_fd)
            except (OSError, HoldfastError) as error:
                reason = f"{death} No other keeper could be started ({error})."
                continue
            with self.lock:
                self._listen_to(child)
                num_saves = self.resend()
                if self._close is not None:
                    child.outbox.send(self._close)
                self.add_problem(
                    f"{reason} Another one (pid {child.pid}) has taken over its {num_saves} unfinished saves."
                )
            return

    def _trusted_config(self) -> KeeperConfig:
        """Return the configuration of the next keeper; after two deaths in a row without the users' code."""
        trusted = self._child_config.with_own_halves_only()
        left_out = [one.name for one in self._child_config.watches if one not in trusted.watches]
        if left_out and self.num_deaths >= _MAX_DEATHS_WITH_USERS_CODE:
            self._child_config = trusted
            with self.lock:
                self.add_problem(
                    f"The keeper of rank {self.config.rank} has died {self.num_deaths} times in a row. The "
                    f"next one works without the halves of these watches: {', '.join(left_out)}."
                )
        return self._child_config

    def _count_death(self, reason: str) -> float:
        """Return the seconds to wait before another keeper is started."""
        self.num_deaths += 1
        self.release_unused()
        if self.num_deaths == 1:
            return 0.0
        pause_s = backoff.doubled(self.num_deaths - 1, _FIRST_PAUSE_S, _LAST_PAUSE_S)
        if self.num_deaths > _MAX_DEATHS:  # one of the saves may be the cause
            self.fail_all(
                f"{reason} It was the {self.num_deaths}th in a row; the saves that it had are given up, and "
                f"another one is started in {format_duration(pause_s)}. Earlier checkpoints remain."
            )
        return pause_s
