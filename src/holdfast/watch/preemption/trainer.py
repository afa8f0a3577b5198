"""Watch of preemption notices: the run saves and stops before its machine is taken away."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from holdfast.checkpoint.watch import Act, Vote, Watch, WatchedRun
from holdfast.system import backoff
from holdfast.system.log import get_logger
from holdfast.watch.preemption.loader_workers import protect_workers
from holdfast.watch.preemption.signals import SignalRecorder
from holdfast.watch.preemption.sources import Cloud, Notice, Unreachable, parse_sources, read_notice

_log = get_logger("watch.preemption")

_FIRST_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0
"""Longest pause before a service that does not answer is polled again."""


class NoticeWatcher:
    """Watcher of signals, files and metadata services. Its `notice` is the first one that arrived."""

    def __init__(self, sources: str | Iterable[str] | None = None) -> None:
        self._signals = SignalRecorder()
        self._sources = parse_sources(sources)
        self._notice: Notice | None = None
        self._rebalance: Notice | None = None
        self._rebalance_files: set[Path] = set()
        self._step_ended_s = time.monotonic()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def watch_signals(self, *, with_interrupt: bool = True) -> bool:
        """Start watching signals. Return False outside the main thread, where that is impossible."""
        protect_workers()
        interrupt = signal.getsignal(signal.SIGINT)
        is_watching = self._signals.watch()
        if is_watching and not with_interrupt:  # Ctrl-C does what the trainer's users are used to
            signal.signal(signal.SIGINT, interrupt)
        return is_watching

    def poll_clouds(self, *, is_first_here: bool) -> None:
        """Start polling the clouds, each in its own thread, on the lowest rank of each host."""
        if not is_first_here or self._threads:  # the others receive its notice with the next step
            return
        for cloud in self._sources.clouds:
            name = f"holdfast-notice-{cloud.name}"
            thread = threading.Thread(target=self._poll, args=(cloud,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def expect_save(self, save_s: float) -> None:
        """Set the time that a step and a durable save take."""
        for cloud in self._sources.clouds:
            cloud.save_s = save_s

    def end_step(self, save_s: float) -> None:
        """Measure the step since the last call; `save_s` is the time of a durable save."""
        before_s, self._step_ended_s = self._step_ended_s, time.monotonic()
        self.expect_save(self._step_ended_s - before_s + save_s)

    def release_signals(self) -> None:
        """Stop watching signals until the next `watch_signals`: no loop is left to stop."""
        self._signals.unwatch()

    def close(self) -> None:
        """Restore the previous signal handlers and stop polling.

        Does not wait for a request in progress. Its thread ends with the response.
        """
        self._signals.unwatch()
        self._stopped.set()

    @property
    def notice(self) -> Notice | None:
        """First final notice that arrived, or None."""
        if self._notice is None and self._signals.received is not None:
            self._notice = Notice(self._signals.received)
        for path in self._sources.files if self._notice is None else ():
            notice = read_notice(path)  # of a file that does not exist, it costs some microseconds per step
            if notice is not None and notice.is_final:
                self._notice = notice
            elif notice is not None and path not in self._rebalance_files:
                self._rebalance_files.add(path)
                self._rebalance = notice
        return self._notice

    @property
    def reason(self) -> str | None:
        """Summary of the notice in a few words, or None."""
        return None if self.notice is None else self.notice.reason

    def pop_rebalance(self) -> Notice | None:
        """Return a new notice that is not final, or None. One save is enough for it."""
        rebalance, self._rebalance = self._rebalance, None
        return rebalance

    def _poll(self, cloud: Cloud) -> None:
        num_failures = 0
        while not self._stopped.is_set():
            try:
                notice = cloud.poll()
                num_failures, pause_s = 0, cloud.pause_s
            except Unreachable as error:
                num_failures += 1
                pause_s = backoff.doubled(num_failures, _FIRST_PAUSE_S, _MAX_PAUSE_S)
                if num_failures == 5:  # not at once: a service may be slow to come up with its machine
                    _log.warning("cannot reach %s for preemption notices: %s", cloud.name, error)
                notice = None
            if notice is not None and notice.is_final:
                self._notice = self._notice or notice
                return
            self._rebalance = notice or self._rebalance
            self._stopped.wait(pause_s)


@dataclass
class Preemption(Watch):
    """Sources of preemption notices.

    Args:
        sources: "aws", "gcp", "azure", "ray", "slurm", "deadline=11h", "file:PATH", several with commas,
            "none", or "auto" for Ray Train in its workers, else the cloud of this machine, and the time limit
            of a Slurm job. By default the value of HOLDFAST_PREEMPTION, else "auto".
        signals: take SIGTERM, SIGUSR1, SIGHUP and SIGINT as notices (in the main thread only), from the first
            call of `steps`, `step_done` or `should_save` on.

    Raises:
        InvalidInput: a source does not exist.
    """

    name: ClassVar[str] = "preemption"

    sources: str | None = None
    _: KW_ONLY
    signals: bool = True

    def __post_init__(self) -> None:
        parse_sources(self.sources)

    @override
    def begin(self, run: WatchedRun) -> None:
        self._run, self._notices = run, NoticeWatcher(self.sources)
        if self.signals:
            protect_workers()  # before a loop begins: it may read from iterators made earlier
        self._notices.poll_clouds(is_first_here=run.is_first_here)

    @override
    def loop_began(self) -> None:
        if self.signals:
            self._notices.watch_signals()

    @override
    def loop_ended(self) -> None:
        self._notices.release_signals()

    @override
    def step(self, step: int) -> Vote | None:
        self._notices.expect_save(self._run.save_s())
        rebalance = self._notices.pop_rebalance()
        if rebalance is not None and self._notices.reason is None:
            return Vote(Act.SAVE, rebalance.reason)
        return self.waiting()

    @override
    def waiting(self) -> Vote | None:
        reason = self._notices.reason
        return None if reason is None else Vote(Act.STOP, reason)

    @override
    def end(self, timeout_s: float | None) -> None:
        self._notices.close()
