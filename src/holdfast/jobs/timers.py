"""Clock of a job, which does not follow jumps of the machine's clock, and its due actions with deadlines.

Both survive a restart of the controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockReading(Struct, frozen=True):
    """Reading of a job's clock. Another controller continues from it.

    Source: clock_gettime(2), CLOCK_BOOTTIME; random(4), boot_id.
    """

    unix_s: float
    boot_s: float  # seconds since the machine has started, with those of sleep
    boot_id: str  # of this start of the machine


def read_machine_clock() -> ClockReading:
    """Return the time of the machine's own clock."""
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return ClockReading(time.time(), boot_s, _BOOT_ID.read_text().strip())


def is_of_earlier_boot(reading: ClockReading | None) -> bool:
    """Return True if the machine was restarted after a reading of a job's clock."""
    return reading is not None and reading.boot_id != read_machine_clock().boot_id


class JobClock:
    """Clock that begins with Unix time, and then counts seconds.

    In the same boot, the clock continues from its last reading. After a restart, it follows the machine's
    clock, but never goes back.
    """

    def __init__(
        self, last: ClockReading | None = None, read: Callable[[], ClockReading] = read_machine_clock
    ) -> None:
        self._read = read
        now = read()
        if last is None:
            begin_s = now.unix_s
        elif last.boot_id == now.boot_id:
            begin_s = last.unix_s + max(0.0, now.boot_s - last.boot_s)
        else:
            begin_s = max(last.unix_s, now.unix_s)
        self._begin_s = begin_s - now.boot_s

    def read(self) -> ClockReading:
        """Return a reading of this clock, for the record."""
        now = self._read()
        return ClockReading(self._begin_s + now.boot_s, now.boot_s, now.boot_id)

    def unix_s(self) -> float:
        """Return the time of this clock."""
        return self._begin_s + self._read().boot_s

    def machine_unix_s(self, unix_s: float) -> float:
        """Return the time on the machine's own clock for one of this clock."""
        now = self._read()
        return unix_s - (self._begin_s + now.boot_s) + now.unix_s


class Timers(Struct, frozen=True):
    """Actions that are due, with deadlines on the job's clock."""

    notice_until_unix_s: float | None = None  # deadline of a notice to send
    notice_source: str = ""
    kill_unix_s: float | None = None  # deadline for all processes of the attempt
    kill_keepers: bool = False
    wake_unix_s: float | None = None  # end of the backoff

    def with_kill(self, at_unix_s: float, *, keepers: bool = False) -> Timers:
        """Return a copy with a deadline for all processes. The earliest counts."""
        if self.kill_unix_s is not None and self.kill_unix_s <= at_unix_s:
            return self
        return replace(self, kill_unix_s=at_unix_s, kill_keepers=keepers)

    def with_notice(self, until_unix_s: float, source: str, *, kills_keepers: bool = False) -> Timers:
        """Return a copy with a notice to send, and the end of all processes at its deadline."""
        due = replace(self, notice_until_unix_s=until_unix_s, notice_source=source)
        return due.with_kill(until_unix_s, keepers=kills_keepers)

    def next_unix_s(self) -> float | None:
        """Return the next deadline, or None."""
        moments = [moment for moment in (self.kill_unix_s, self.wake_unix_s) if moment is not None]
        return min(moments, default=None)
