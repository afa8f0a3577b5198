"""Periods of slow ranks, as events of the history; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import Corrupt, printable
from holdfast.system.documents import read_dataclass
from holdfast.system.units import format_duration

BEGUN, OVER = "slow-rank", "slow-rank-over"  # kinds of the events at the begin and end of a period
_WHAT = "a slow rank"


@dataclass(frozen=True, slots=True)
class SlowPeriod:
    """Period during which the other ranks waited for one."""

    rank: int  # its number
    host: str  # name of its machine
    since_unix_s: float  # begin
    factor: float  # its own time, as a multiple of that of a usual rank
    cost_share: float  # share of the training's time that all lose by it and other slow ranks together
    step_s: float  # duration of a step
    cause: str = ""  # what most of its longer time is; "" if that is not known
    until_unix_s: float | None = None  # end; None while it lasts

    @property
    def cost_s(self) -> float:
        """Cost for all, in seconds of each step."""
        return self.cost_share * self.step_s

    def members(self) -> dict[str, Any]:
        """Return the members of its line in the history."""
        return {"slow": asdict(self)}

    def describe(self) -> str:
        """Return it as one line of text."""
        cause = f"; most of the difference is {self.cause}" if self.cause else ""
        cost = f"{self.cost_share:.0%} of their time, {format_duration(self.cost_s)} of each step"
        return printable(
            f"rank {self.rank} on {self.host} takes {self.factor:.2f} times as long as the others for its "
            f"own part of a step; all lose {cost}{cause}"
        )


@dataclass(frozen=True, slots=True)
class SlowAttempt:
    """Slow period, with its attempt."""

    attempt: int  # the attempt
    period: SlowPeriod  # the period; without an end if the attempt ended first


def decode_period(line: Mapping[str, Any]) -> SlowPeriod | None:
    """Return the period in a line of the history, else None."""
    if line.get("event") not in (BEGUN, OVER) or not isinstance(line.get("slow"), dict):
        return None
    try:
        return read_dataclass(SlowPeriod, line["slow"], _WHAT)
    except Corrupt:
        return None


def list_slow_periods(lines: Iterable[Mapping[str, Any]]) -> list[SlowAttempt]:
    """Return the slow periods in lines of a history, which are ordered by time; the oldest first."""
    found: dict[tuple[int, int, float], SlowAttempt] = {}
    for line in lines:
        attempt, period = line.get("attempt"), decode_period(line)
        if period is not None and type(attempt) is int:
            found[attempt, period.rank, period.since_unix_s] = SlowAttempt(attempt, period)
    return sorted(found.values(), key=lambda one: one.period.since_unix_s)


def block_of_slow(periods: Iterable[SlowPeriod], home: str) -> str:
    """Return the block that a training prints when ranks are slow."""
    found = list(periods)
    ranks = ", ".join(f"{one.rank} ({one.host})" for one in found)
    lines = [f"SLOW RANK{'S' if len(found) > 1 else ''}: all ranks wait for rank {ranks}, step after step."]
    lines += [f"  {one.describe()}" for one in found]
    lines.append(f"  Nothing was done; training continues. The history has it too: holdfast history {home}")
    return printable("\n".join(lines))


def block_of_end(period: SlowPeriod) -> str:
    """Return the line that a training prints at the end of a period."""
    lasted_s = (period.until_unix_s or period.since_unix_s) - period.since_unix_s
    cost = format_duration(period.cost_share * lasted_s)
    return printable(
        f"rank {period.rank} ({period.host}) is as quick as the others again. It was slow for "
        f"{format_duration(lasted_s)}, which has cost all about {cost}."
    )
