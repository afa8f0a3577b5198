"""Save: the future of one checkpoint, from the copy to the commit in home."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import HoldfastError, TimedOut, Unsupported, redact
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.units import Duration, parse_timeout

_log = get_logger("checkpoint.keeper")


class Save:
    """Future of one save: staged, then durable, then in home; or failed, or skipped.

    Attributes:
        step: optimizer steps completed.
        blocked_s: time that `save()` took from the training loop.
        num_bytes: size of this rank's data.
        staged_s: time from `save()` to staged; None before.
        durable_s: time from `save()` to durable; None before.
        skipped: True if no staging memory was free for it.
        began_s: time of the call of `save`, of the monotonic clock.
        delay: reason for which the keeper waits, as a sentence; empty without one.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.blocked_s = 0.0
        self.num_bytes = 0
        self.staged_s: float | None = None
        self.durable_s: float | None = None
        self._mirrored = threading.Event()
        self.skipped = False
        self.began_s = time.monotonic()
        self._staged, self._ended, self._arrived = threading.Event(), threading.Event(), threading.Event()
        self._error: HoldfastError | None = None
        self._home_error: HoldfastError | None = None
        self.delay = ""
        self._describe_wait: Callable[[], str] = str
        self._is_reported = self.has_peers = False

    def __repr__(self) -> str:
        return f"Save(step={self.step}, {self.state})"

    @property
    def state(self) -> str:
        """One of: staging, staged, durable, skipped, failed."""
        if self.skipped or self._error is not None:
            return "skipped" if self.skipped else "failed"
        if self._ended.is_set():
            return "durable"
        return "staged" if self._staged.is_set() else "staging"

    @property
    def failed(self) -> HoldfastError | None:
        """The error that ended this save; None while it may become durable, or is durable."""
        return self._error

    @property
    def durable(self) -> bool:
        """True once the checkpoint is committed."""
        return self.state == "durable"

    @property
    def mirrored(self) -> bool:
        """True once the memory of peers has this rank's files, or those of a newer save."""
        return self._mirrored.is_set()

    @property
    def wait_reason(self) -> str:
        """Cause and duration of the wait, as a sentence."""
        return self.delay or self._describe_wait() or f"It is {self.state} now."

    @property
    def is_settled_in_home(self) -> bool:
        """True once the checkpoint is in home, or will never be."""
        return self._arrived.is_set()

    # -- as a future -----------------------------------------------------------------------------------------
    def done(self) -> bool:
        """Return True if the save is durable, failed or skipped."""
        return self._ended.is_set()

    def result(self, timeout: Duration | None = None) -> int | None:
        """Wait until the save is durable, and return its step; None if it was skipped.

        Args:
            timeout: seconds, or text such as "10m"; None for no limit.

        Blocks: as `wait_durable`.
        """
        self.wait_durable(timeout)
        return None if self.skipped else self.step

    def exception(self, timeout: Duration | None = None) -> HoldfastError | None:
        """Wait until the save is done, and return its error, or None.

        Args:
            timeout: seconds, or text such as "10m"; None for no limit.

        Blocks: as `wait_durable`.
        """
        self._wait(self._ended, timeout, "durable")
        return self._error

    # -- by stage --------------------------------------------------------------------------------------------
    def wait_staged(self, timeout: Duration | None = None) -> None:
        """Wait until training can no longer change what is saved.

        Blocks: until the copy is complete.
        """
        self._wait_or_raise(self._staged, timeout, "staged")

    def wait_durable(self, timeout: Duration | None = None) -> None:
        """Wait until the checkpoint is committed: every rank's bytes and the manifest are durable.

        Where several hosts have local folders of their own, this waits for this rank's files in its folder.
        `wait_home` waits for the commit.

        Ranks: not collective, but needs every rank's part.
        Blocks: until the keepers of all ranks are done.
        """
        self._wait_or_raise(self._ended, timeout, "durable")

    def wait_mirrored(self, timeout: Duration | None = None) -> None:
        """Wait until the memory of peers has this rank's files of this save or of a newer one.

        Once it does on all ranks, this step survives the loss of any one host. Needs `peers`.

        Raises:
            Unsupported: the run has no peers.

        Ranks: not collective, but the loss of a host needs every rank's copies.
        Blocks: until the peers have verified the copies.
        """
        self._wait_or_raise(self._staged, timeout, "staged")
        if self.skipped:
            return
        if not self.has_peers:
            raise Unsupported(
                f"Step {self.step} has no copy on another host, and will have none: this run has no peers. "
                "Give Checkpointer(peers=1), and start ranks on two hosts or more.",
                step=self.step,
            )
        self._wait(self._mirrored, timeout, "mirrored")

    def wait_home(self, timeout: Duration | None = None) -> None:
        """Wait until this checkpoint or a newer one is committed in home.

        Without `local` this is `wait_durable`. A save that is not due in home, see `Home(every=)`, arrives
        only after `Checkpointer.wait`.

        Ranks: not collective, but needs every rank's files.
        Blocks: until the keepers of all ranks are done.
        """
        self._wait_or_raise(self._arrived, timeout, "in home")
        if self._home_error is not None:
            raise self._home_error

    def _wait_or_raise(self, event: threading.Event, timeout: Duration | None, stage: str) -> None:
        self._wait(event, timeout, stage)
        if self._error is not None:
            raise self._error

    def _wait(self, event: threading.Event, timeout: Duration | None, stage: str) -> None:
        """Wait for an event, and log one line for this save if that takes long."""

        def report() -> None:
            if not self._is_reported and not self.delay:  # the delay has a line of its own
                self._is_reported = True
                _log.info("waiting until step %d is %s. %s", self.step, stage, redact(self.wait_reason))

        timeout_s = parse_timeout(timeout, "timeout")
        if event.is_set():
            return
        with reported_if_slow(report):
            event.wait(timeout_s)
        if not event.is_set():
            raise TimedOut(
                f"Step {self.step} is not {stage} after {timeout_s} s. {self.wait_reason} The save continues "
                "in the background.",
                step=self.step,
            )

    # -- set by the stager and the keeper --------------------------------------------------------------------
    def explain_by(self, describe_wait: Callable[[], str]) -> None:
        """Set the function that returns the cause of the wait, as a sentence."""
        self._describe_wait = describe_wait

    def mark_staged(self) -> None:
        """Record that the copy is complete."""
        self.staged_s = time.monotonic() - self.began_s
        self._staged.set()

    def mark_durable(self) -> None:
        """Record that the checkpoint is committed."""
        self.durable_s = time.monotonic() - self.began_s
        self._staged.set()
        self._ended.set()

    def mark_mirrored(self) -> None:
        """Record that peers have this rank's files, or those of a newer save."""
        self._mirrored.set()

    def mark_home(self) -> None:
        """Record that the checkpoint is committed in home."""
        self._arrived.set()

    def mark_home_failed(self, error: HoldfastError) -> None:
        """Record that the checkpoint will not reach home; it stays in the local tier."""
        self._home_error = error
        self._arrived.set()

    def mark_failed(self, error: HoldfastError) -> None:
        """Record the error that ended this save."""
        self._error = error
        self._end()

    def mark_skipped(self) -> None:
        """Record that no staging memory was free, so nothing was copied."""
        self.skipped = True
        self._end()

    def _end(self) -> None:
        self._staged.set()
        self._ended.set()
        self._arrived.set()
