"""Preemption notices while Lightning trains: agreed by all ranks after a batch."""

from __future__ import annotations

import signal
import threading
from typing import Any

from holdfast.checkpoint.ranks import Ranks
from holdfast.watch.preemption import NoticeWatcher

_RANKS_S = 3600.0
"""Longest wait for a rank that does not reach the end of its batch."""


class Preemptions:
    """Preemption notices of one training.

    Args:
        sources: sources other than signals, see `holdfast.checkpoint.run.options.Preemption`.
    """

    def __init__(self, sources: str | None) -> None:
        self.reason: str | None = None
        """Reason of the notice that has arrived on any rank."""
        self._sources = sources
        self._watcher: NoticeWatcher | None = None
        self._ranks: Ranks | None = None

    def watch(self, trainer: Any) -> None:
        """Start watching, when training begins.

        Lightning's handler of SIGTERM is replaced: on several ranks it communicates wherever it interrupts
        them, and it ends training with status 0. Under Slurm's requeueing it stays.

        Ranks: collective.
        """
        self._watcher = NoticeWatcher(self._sources)
        if threading.current_thread() is threading.main_thread() and not _is_requeued(trainer):
            before = trainer._signal_connector._original_handlers.get(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
            self._watcher.watch_signals(with_interrupt=False)
        self._ranks = Ranks(timeout_s=_RANKS_S)
        self._watcher.poll_clouds(is_first_here=self._ranks.is_first_here())

    def exchange(self, trainer: Any, *, is_dropped: bool, save_s: float) -> bool:
        """Exchange notices with the other ranks.

        Args:
            trainer: the trainer.
            is_dropped: a save of this rank was dropped.
            save_s: time of the last save, for notices of an end that is known beforehand.

        Returns:
            True if a save of any rank was dropped. All ranks return the same.

        Ranks: collective, after every batch.
        """
        if self._watcher is None or self._ranks is None:
            return False
        self._watcher.end_step(save_s)
        (has_notice, has_dropped), _ = self._ranks.exchange_flags(
            trainer.fit_loop.total_batch_idx, (self._watcher.reason is not None, is_dropped), ()
        )
        if has_notice and self.reason is None:
            self.reason = self._watcher.reason or "another rank's notice"
        return has_dropped

    def have_arrived(self) -> bool:
        """Return True if this rank has a notice, or has received another's."""
        if self._watcher is not None:
            self.reason = self.reason or self._watcher.reason
        return self.reason is not None

    def may_stop(self, trainer: Any) -> bool:
        """Return True if a rank has a notice, and training may stop here."""
        # Gradients that were accumulated over some batches are not part of a checkpoint.
        return self.reason is not None and not trainer.fit_loop._should_accumulate()

    def finish(self) -> None:
        """Complete the exchange of the ranks at an orderly end.

        Ranks: collective.
        """
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.barrier_and_close()

    def release(self) -> None:
        """Stop watching."""
        self._ranks = None
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None


def _is_requeued(trainer: Any) -> bool:
    """Return True if Lightning itself requeues this job with Slurm."""
    environment = trainer._accelerator_connector.cluster_environment
    return bool(getattr(environment, "auto_requeue", False))
