"""Cadence of saves: which step is saved and sent home, and what saves cost; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.checkpoint.policy import Every, EveryAuto, Moment


class Flags(NamedTuple):
    """Flags that a rank sends after a step; in the received ones each is True if any rank has set it.

    In those that `Cadence.decide` returns, equal on all ranks, `is_due` means that this step is saved, and
    `is_torn` that it replaces the last save.
    """

    is_preempted: bool = False  # a preemption notice has arrived
    is_due: bool = False  # by the clock of rank 0, or because the machine may be reclaimed
    is_due_home: bool = False  # by the clock of rank 0
    lacks_proposal: bool = False  # see `StableStep`
    is_torn: bool = False  # the last save is torn
    must_go_back: bool = False  # a watch asks for it, and the ranks have to decide about it


class Cadence:
    """Schedule of saves, from policies, measured costs and the flags of all ranks; `now_s` is monotonic."""

    def __init__(self, every: Sequence[Every], home: HomeCadence, *, rank: int, now_s: float) -> None:
        self.home = home
        self.meter = Meter()
        self.mtbf_s: float | None = None  # mean time between the run's own failures, if there are enough
        self._every = every
        self._is_clock = rank == 0
        self._step_ended_s: float | None = None
        self.restart(0, now_s)

    def restart(self, step: int, now_s: float) -> None:
        """Count from `step`, which was saved or restored just now."""
        self.saved_step, self._saved_s = step, now_s

    def save(self, step: int, now_s: float) -> None:
        """Record that a save of `step` has begun; the time since the last step was the save's."""
        self.restart(step, now_s)
        self._step_ended_s = now_s

    def end_step(self, now_s: float, *, in_flight: bool) -> None:
        """Measure the training step that has just ended; with a save `in_flight` it may have been slower."""
        if self._step_ended_s is not None:
            self.meter.step(now_s - self._step_ended_s, in_flight=in_flight)

    def begin_step(self, now_s: float) -> None:
        """Start measuring the next training step."""
        self._step_ended_s = now_s

    def add_clock(self, step: int, now_s: float, flags: Flags) -> Flags:
        """Return the flags of this rank after `step`, with what the clock of rank 0 adds to them."""
        if not self._is_clock:
            return flags
        return flags._replace(
            is_due=flags.is_due or self._is_due(step, now_s, timed=True),
            is_due_home=self.home.is_due(step, now_s, timed=True),
        )

    def decide(self, step: int, now_s: float, received: Flags, *, sent_step: int) -> Flags:
        """Return the decisions after `step`, from the flags that all ranks sent after `sent_step`."""
        is_new = self.saved_step < sent_step  # else a save has begun since the flags were sent
        self.home.receive(is_due=received.is_due_home, sent_step=sent_step)
        is_repeat = received.is_torn and is_new
        is_due = (
            self._is_due(step, now_s, timed=False)
            or received.is_preempted
            or is_repeat
            or (received.is_due and is_new)
        )
        return received._replace(is_due=is_due, is_torn=is_repeat)

    @property
    def auto(self) -> EveryAuto | None:
        """The policy that chooses its interval, if there is one."""
        return next((one for one in self._every if isinstance(one, EveryAuto)), None)

    def _is_due(self, step: int, now_s: float, *, timed: bool) -> bool:
        costs = self.meter.save_cost_s, self.meter.durable_s, self.mtbf_s
        return _is_due(self._every, Moment(step, now_s, self.saved_step, self._saved_s, *costs), timed=timed)


class HomeCadence:
    """Schedule of the saves that are sent home. Without policies all saves are."""

    def __init__(self, every: Sequence[Every] | None, *, now_s: float) -> None:
        self._every = every
        self._sent_step, self._sent_s = 0, now_s  # the last save that was sent home
        self._is_due = False  # by the clock of rank 0, as all ranks have received it

    def is_due(self, step: int, now_s: float, *, timed: bool) -> bool:
        """Return True if a policy that uses a clock, or one of the others, wants `step` in home."""
        return _is_due(self._every or (), Moment(step, now_s, self._sent_step, self._sent_s), timed=timed)

    def receive(self, *, is_due: bool, sent_step: int) -> None:
        """Record the decision of rank 0's clock, which it sent at `sent_step`."""
        self._is_due = is_due and self._sent_step < sent_step  # else a save has been sent home since

    def decide(self, step: int, now_s: float, *, must: bool, alone: bool) -> bool:
        """Return True if the save of `step` is sent home at once; count it as sent. Equal on every rank.

        A rank that is alone asks its own clock, also without an exchange.
        """
        goes = (
            self._every is None
            or must
            or self._is_due
            or self.is_due(step, now_s, timed=False)
            or (alone and self.is_due(step, now_s, timed=True))
        )
        if goes:
            self._is_due, self._sent_step, self._sent_s = False, step, now_s
        return goes


def _is_due(policies: Sequence[Every], moment: Moment, *, timed: bool) -> bool:
    return any(policy.due(moment) for policy in policies if policy.timed == timed)


class Meter:
    """Meter of the cost of saves: blocked time, and steps slowed while a save is in flight."""

    def __init__(self) -> None:
        self.save_cost_s: float | None = None
        self.durable_s: float | None = None
        self.step_s = 0.0  # the last step
        self._idle: deque[float] = deque(maxlen=50)  # seconds of undisturbed steps
        self._costs: deque[float] = deque(maxlen=5)
        self._slowed_s = 0.0

    def step(self, seconds: float, *, in_flight: bool) -> None:
        """Add a training step that took `seconds`, without save() itself."""
        self.step_s = seconds
        if not in_flight:
            self._idle.append(seconds)
        elif self._idle:
            self._slowed_s += seconds - _median(self._idle)

    def saved(self, *, blocked_s: float, durable_s: float) -> None:
        """Add a durable save; the time that steps have lost since the last one is its cost."""
        self._costs.append(max(0.0, blocked_s + self._slowed_s))
        self._slowed_s = 0.0
        self.save_cost_s = _median(self._costs)
        self.durable_s = durable_s


def _median(values: Iterable[float]) -> float:
    """Return the median of some values."""
    from statistics import median  # slow, and most processes that use policies never need it

    return median(values)
