"""Announcements of slow ranks: which periods begin and end with each verdict; pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from holdfast.watch.pace.judgement import PaceJudge, PaceVerdict
from holdfast.watch.pace.slow_periods import SlowPeriod
from holdfast.watch.pace.windows import PaceWindow, find_cause

_RECENT = 8
"""Windows that the cause of a slow rank is found in."""
_MAX_STEPS = 1000
"""Windows whose times are remembered, for the begin of a period."""


@dataclass(frozen=True, slots=True)
class PaceChange:
    """Slow periods that have begun and ended with a window."""

    begun: tuple[SlowPeriod, ...] = ()
    ended: tuple[SlowPeriod, ...] = ()


class SlowRankAnnouncer:
    """Announcer of the slow ranks of one attempt: each period once when it is certain, and once at its end.

    Args:
        world_size: number of ranks.
        factor: own time from which a rank is slow, as a multiple of that of a usual rank.

    Attributes:
        verdict: verdict about the newest windows; None before the first.
    """

    def __init__(self, world_size: int, factor: float) -> None:
        self.verdict: PaceVerdict | None = None
        self._world_size = world_size
        self._judge = PaceJudge(factor)
        self._recent: deque[PaceWindow] = deque(maxlen=_RECENT)
        self._begins: deque[float] = deque(maxlen=_MAX_STEPS)  # of the windows that were judged
        self._num_judged = 0
        self._open: dict[int, SlowPeriod] = {}

    def add(self, window: PaceWindow, *, window_s: float, hosts: dict[int, str]) -> PaceChange:
        """Add a window with all ranks.

        Args:
            window_s: its length.
            hosts: name of the host of each rank.
        """
        shares = window.shares
        if not shares:
            return PaceChange()
        self._recent.append(window)
        self._begins.append(window.number * window_s)
        self._num_judged += 1
        self.verdict = self._judge.add(shares, world_size=self._world_size, whole_s=1.0, step_s=window.step_s)
        return self._change(self.verdict, window, window_s, hosts)

    def close(self, now_s: float) -> PaceChange:
        """Return the periods that end with the training."""
        ended = tuple(replace(one, until_unix_s=now_s) for one in self._open.values())
        self._open.clear()
        return PaceChange(ended=ended)

    def _change(
        self, verdict: PaceVerdict, window: PaceWindow, window_s: float, hosts: dict[int, str]
    ) -> PaceChange:
        now_s, slow = (window.number + 1) * window_s, {one.rank: one for one in verdict.slow}
        ended = [replace(self._open.pop(rank), until_unix_s=now_s) for rank in set(self._open) - set(slow)]
        begun: list[SlowPeriod] = []
        for rank, one in slow.items():
            before = self._open.get(rank)
            period = SlowPeriod(
                rank,
                hosts.get(rank, "?"),
                self._begin(one.since) if before is None else before.since_unix_s,
                one.factor,
                verdict.cost_share,
                round(window.step_s, 6),
                find_cause(tuple(self._recent), rank),
            )
            self._open[rank] = period
            if before is None:
                begun.append(period)
        return PaceChange(tuple(begun), tuple(sorted(ended, key=lambda one: one.rank)))

    def _begin(self, number: int) -> float:
        """Return the begin of a judged window; that of the oldest remembered one if it is older."""
        return self._begins[max(0, number - (self._num_judged - len(self._begins)))]
