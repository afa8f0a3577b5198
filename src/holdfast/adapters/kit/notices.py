"""Preemption notices of a loop that another library or the script itself runs."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.checkpoint.ranks import Ranks
from holdfast.watch.preemption import NoticeWatcher


class Notices:
    """Preemption notices of one training, which all ranks agree on. Ctrl-C keeps its usual effect.

    Args:
        sources: sources other than signals, see `holdfast.checkpoint.run.options.Preemption`.
        ranks: ranks that agree.
        signals: signals are notices too.

    Attributes:
        agreed: reason of the notice that all ranks have agreed on; None while there is none.
    """

    def __init__(self, sources: str | Iterable[str] | None, ranks: Ranks, *, signals: bool) -> None:
        self.agreed: str | None = None
        self._ranks, self._num_exchanges = ranks, 0
        self._watcher = NoticeWatcher(sources)
        if signals:
            self._watcher.watch_signals(with_interrupt=False)
        self._watcher.poll_clouds(is_first_here=ranks.is_first_here())

    @property
    def reason(self) -> str | None:
        """Reason of the notice that this rank has, or that all have agreed on."""
        return self.agreed or self._watcher.reason

    def end_step(self, save_s: float) -> None:
        """Measure the step since the last call; `save_s` is the time of a durable save."""
        self._watcher.end_step(save_s)

    def exchange(self, *flags: bool) -> tuple[bool, ...]:
        """Exchange notices with the other ranks. With several ranks, the result is one call late.

        Args:
            flags: other facts to exchange.

        Returns:
            For each of `flags`, whether it is true on any rank. All ranks return the same.

        Ranks: collective; every rank calls it equally often.
        """
        self._num_exchanges += 1
        own = self.reason is not None, *flags
        (has_notice, *others), _ = self._ranks.exchange_flags(self._num_exchanges, own, ())
        if has_notice:
            self.agreed = self.reason or "another rank's notice"
        return tuple(others)

    def finish(self) -> None:
        """Complete the exchange of the ranks at an orderly end.

        Ranks: collective.
        """
        self._ranks.barrier_and_close()

    def close(self) -> None:
        """Stop watching."""
        self._watcher.close()
