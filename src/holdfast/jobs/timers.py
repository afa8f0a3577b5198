"""Timers of a job: due actions with deadlines, which survive a restart of the controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.jobs.state_machine import Action, Backoff, KillAttempt, SendNotice, StartAttempt


@dataclass(frozen=True, slots=True)
class Timers:
    """Actions that are due, with deadlines on the job's clock."""

    start: int | None = None  # attempt to start
    notice_until_unix_s: float | None = None  # deadline of a notice to send
    notice_source: str = ""
    kill_unix_s: float | None = None  # deadline for all processes of the attempt
    kill_keepers: bool = False
    wake_unix_s: float | None = None  # end of the backoff

    def schedule(self, orders: Iterable[Action], now_unix_s: float) -> Timers:
        """Return a copy with actions scheduled."""
        due = self
        for order in orders:
            due = due._with(order, now_unix_s)
        return due

    def _with(self, order: Action, now_unix_s: float) -> Timers:
        if isinstance(order, StartAttempt):
            return Timers(start=order.attempt)  # actions for the previous attempt are obsolete
        if isinstance(order, SendNotice):
            until = now_unix_s + order.lead_s
            return dataclasses.replace(self, notice_until_unix_s=until, notice_source=order.source)
        if isinstance(order, KillAttempt):
            return self._with_kill(order, now_unix_s + order.after_s)
        assert isinstance(order, Backoff)
        return Timers(wake_unix_s=now_unix_s + order.seconds)

    def _with_kill(self, order: KillAttempt, at_unix_s: float) -> Timers:
        if self.kill_unix_s is not None and self.kill_unix_s <= at_unix_s:
            return self  # an earlier deadline is set
        return dataclasses.replace(self, kill_unix_s=at_unix_s, kill_keepers=order.with_keepers)

    def next_unix_s(self) -> float | None:
        """Return the next deadline, or None."""
        moments = [moment for moment in (self.kill_unix_s, self.wake_unix_s) if moment is not None]
        return min(moments, default=None)
