"""Preemption notices of a script with a loop of its own."""

from __future__ import annotations

import weakref

from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.run.options import Preemption
from holdfast.errors import Preempted
from holdfast.watch.preemption import NoticeWatcher


class Notices:
    """Preemption notices of one session. Ctrl-C keeps its usual effect.

    Args:
        preemption: their sources.
        ranks: ranks that agree.

    Attributes:
        saved_step: step of the newest durable save.
    """

    def __init__(self, preemption: Preemption, ranks: Ranks) -> None:
        self._ranks = ranks
        self.saved_step = 0
        self._num_exchanges = 0
        self._agreed: str | None = None
        self._watcher = NoticeWatcher(preemption.sources)
        if preemption.signals:
            self._watcher.watch_signals(with_interrupt=False)
        self._watcher.poll_clouds(is_first_here=ranks.is_first_here())
        _open.add(self)

    @property
    def reason(self) -> str | None:
        """Reason of the notice that this rank has, or that all have agreed on."""
        return self._agreed or self._watcher.reason

    def note(self, reason: str) -> None:
        """Note the reason that all ranks agree on."""
        self._agreed = reason

    def end_step(self, save_s: float) -> None:
        """Measure the step since the last call; `save_s` is the time of a durable save."""
        self._watcher.end_step(save_s)

    def have_arrived(self) -> bool:
        """Return True if any rank has a notice. With several ranks, it is one call late.

        Ranks: collective.
        """
        self._num_exchanges += 1
        (has_notice,), _ = self._ranks.exchange_flags(self._num_exchanges, (self.reason is not None,), ())
        if has_notice:
            self.note(self.reason or "another rank's notice")
        return has_notice

    def close(self) -> None:
        """Stop watching."""
        self._watcher.close()
        _open.discard(self)


_open: weakref.WeakSet[Notices] = weakref.WeakSet()


def end_preempted(error: Exception) -> None:
    """End the process if a loader has failed after a notice.

    Its workers may have died of it. Nothing is saved: only the script knows where its step ends. The last
    save becomes durable.

    Raises:
        Preempted: otherwise nothing is done.
    """
    for one in list(_open):
        if one.reason is not None:
            reason = f"{one.reason}; {type(error).__name__} has ended the next batch: {error}"
            raise Preempted(one.saved_step, reason) from error
