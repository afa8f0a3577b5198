"""Traces of interruptions, and schedules made of them by scaling their time; pure."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Trouble(enum.Enum):
    """Something that interrupts a training."""

    NODE = "node lost"  # all processes of a node are killed, the keeper too
    RANK = "process killed"  # kill -9 of one rank
    HANG = "hang"  # one rank is stopped
    NOTICE = "notice"  # preemption with a lead
    DISK = "disk full"  # writes fail for a while, then the process is killed
    DAMAGE = "damaged checkpoint"  # the newest checkpoint loses half of a file, then the node is lost


@dataclass(frozen=True, slots=True)
class Interruption:
    """One interruption of a job in a trace."""

    at_h: float  # since the job could first run
    trouble: Trouble
    outage_h: float = 0.0  # until enough nodes are there again


ROUNDING_H = 1e-9  # by which an outage may pass its own end: moments are sums and differences of floats


@dataclass(frozen=True, slots=True)
class Trace:
    """Interruptions of one job, in order. None begins during the outage of another."""

    name: str
    num_nodes: int  # of the replayed job
    interruptions: tuple[Interruption, ...]
    hours: float  # from the first moment at which the job could run, to the end of the trace

    def __post_init__(self) -> None:
        """Check the order.

        Raises:
            ValueError: interruptions overlap, or one is outside of the trace.
        """
        free_h = 0.0
        for one in self.interruptions:
            if one.at_h < free_h - ROUNDING_H or one.outage_h < 0:
                raise ValueError(
                    f"{self.name}: an interruption at {one.at_h} h, in an outage until {free_h} h"
                )
            free_h = one.at_h + one.outage_h
        if free_h > self.hours + ROUNDING_H:
            raise ValueError(f"{self.name}: an outage until {free_h} h, after its end at {self.hours} h")

    @property
    def available_h(self) -> float:
        """Hours that the trace leaves to the job."""
        return self.hours - sum(one.outage_h for one in self.interruptions)

    @property
    def share(self) -> float:
        """Share of the time that the trace itself leaves to the job."""
        return self.available_h / self.hours

    @property
    def mtbf_h(self) -> float:
        """Available hours per interruption."""
        return self.available_h / max(1, len(self.interruptions))

    def window(self, number: int, count: int) -> Trace:
        """Return the part with the interruptions from `number * count` on, up to the next one after them.

        Raises:
            ValueError: the trace does not have that many.
        """
        first, after = number * count, (number + 1) * count
        if after > len(self.interruptions):
            raise ValueError(f"{self.name} has {len(self.interruptions)} interruptions, not {after}")
        begin = self.interruptions[first - 1] if first else Interruption(0.0, Trouble.NODE)
        begin_h = begin.at_h + begin.outage_h
        end_h = self.interruptions[after].at_h if after < len(self.interruptions) else self.hours
        part = tuple(
            dataclasses.replace(one, at_h=one.at_h - begin_h) for one in self.interruptions[first:after]
        )
        return Trace(self.name, self.num_nodes, part, end_h - begin_h)


@dataclass(frozen=True, slots=True)
class Event:
    """One interruption of a replay."""

    at_s: float
    trouble: Trouble
    outage_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """Replay of a part of a trace."""

    trace: str
    num_nodes: int
    events: tuple[Event, ...]
    length_s: float
    hour_s: float  # seconds of the replay per hour of the trace

    @property
    def available_s(self) -> float:
        """Seconds that the schedule leaves to the job."""
        return self.length_s - sum(event.outage_s for event in self.events)


def scale(part: Trace, mtbf_s: float, *, max_outage_s: float) -> Schedule:
    """Return the schedule that leaves the job `mtbf_s` per interruption, on average.

    Nothing happens during an outage, so longer ones are cut to `max_outage_s`.
    """
    hour_s = mtbf_s / part.mtbf_h
    events, now_s, free_h = [], 0.0, 0.0
    for one in part.interruptions:
        now_s += (one.at_h - free_h) * hour_s
        event = Event(now_s, one.trouble, min(one.outage_h * hour_s, max_outage_s))
        events.append(event)
        now_s, free_h = now_s + event.outage_s, one.at_h + one.outage_h
    length_s = now_s + (part.hours - free_h) * hour_s
    return Schedule(part.name, part.num_nodes, tuple(events), length_s, hour_s)


def from_counts(
    name: str,
    num_nodes: int,
    counts: Sequence[tuple[float, int]],
    *,
    needed: int,
    troubles: Iterable[Trouble],
) -> Trace:
    """Return the trace of a job that needs `needed` nodes, from the number of available nodes over time.

    The job is interrupted whenever a node is lost, also if enough others are left: it may have been one of
    the job's.

    Args:
        counts: (hours, nodes) in order; the last one is the end of the trace.
        troubles: what the losses are, in order; repeated.

    Raises:
        ValueError: there are never enough nodes.
    """
    starts = [position for position, (_, count) in enumerate(counts) if count >= needed]
    if not starts:
        raise ValueError(
            f"{name}: expected {needed} nodes at some time, found at most {max(counts, default=0)}"
        )
    counts = counts[starts[0] :]
    begin_h, before = counts[0]
    kinds = itertools.cycle(troubles)
    found: list[Interruption] = []
    lost_h: float | None = None  # since when there are too few
    for at_h, count in counts[1:]:
        if lost_h is None and count < before:
            if count < needed:
                lost_h = at_h - begin_h
            else:
                found.append(Interruption(at_h - begin_h, next(kinds)))
        elif lost_h is not None and count >= needed:
            found.append(Interruption(lost_h, next(kinds), at_h - begin_h - lost_h))
            lost_h = None
        before = count
    end_h = counts[-1][0] - begin_h
    return Trace(name, num_nodes, tuple(found), end_h if lost_h is None else lost_h)
