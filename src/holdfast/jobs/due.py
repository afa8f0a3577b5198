"""What is to be done about a job, and when: the machine's orders as deadlines that outlive a controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.jobs.machine import Kill, Order, Pause, Start, Tell


@dataclass(frozen=True, slots=True)
class Due:
    """All that is to be done; moments in seconds since 1970."""

    start: int | None = None  # attempt to be started
    tell_until_unix_s: float | None = None  # a notice is to be given, and this is its deadline
    tell_source: str = ""
    kill_unix_s: float | None = None  # from then on no process of the attempt may be left
    kill_keepers: bool = False
    wake_unix_s: float | None = None  # when the pause is over

    def plus(self, orders: Iterable[Order], now_unix_s: float) -> Due:
        """With new orders."""
        due = self
        for order in orders:
            due = due._with(order, now_unix_s)
        return due

    def _with(self, order: Order, now_unix_s: float) -> Due:
        if isinstance(order, Start):
            return Due(start=order.attempt)  # whatever was due to the attempt before it is over with that
        if isinstance(order, Tell):
            until = now_unix_s + order.lead_s
            return dataclasses.replace(self, tell_until_unix_s=until, tell_source=order.source)
        if isinstance(order, Kill):
            return self._with_kill(order, now_unix_s + order.after_s)
        assert isinstance(order, Pause)
        return Due(wake_unix_s=now_unix_s + order.seconds)

    def _with_kill(self, order: Kill, at_unix_s: float) -> Due:
        if self.kill_unix_s is not None and self.kill_unix_s <= at_unix_s:
            return self  # it comes sooner already
        return dataclasses.replace(self, kill_unix_s=at_unix_s, kill_keepers=order.with_keepers)

    def next_unix_s(self) -> float | None:
        """The next moment at which something is due by the clock."""
        moments = [moment for moment in (self.kill_unix_s, self.wake_unix_s) if moment is not None]
        return min(moments, default=None)
