"""Preemption notices of a script with a loop of its own."""

from __future__ import annotations

import signal
import threading

from holdfast.checkpointer.options import Preemption
from holdfast.notice import NoticeWatcher
from holdfast.ranks import Ranks


class Notices:
    """Preemption notices of one session. Ctrl-C keeps its usual effect.

    Args:
        preemption: their sources.
        ranks: ranks that agree.
    """

    def __init__(self, preemption: Preemption, ranks: Ranks) -> None:
        self._ranks = ranks
        self._num_exchanges = 0
        self._agreed: str | None = None
        self._watcher = NoticeWatcher(preemption.sources)
        if preemption.signals and threading.current_thread() is threading.main_thread():
            interrupt = signal.getsignal(signal.SIGINT)
            self._watcher.watch_signals()
            signal.signal(signal.SIGINT, interrupt)
        self._watcher.poll_clouds(is_first_here=ranks.is_first_here())

    @property
    def reason(self) -> str | None:
        """Reason of the notice that this rank has, or that all have agreed on."""
        return self._agreed or self._watcher.reason

    def note(self, reason: str) -> None:
        """Note the reason that all ranks agree on."""
        self._agreed = reason

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
