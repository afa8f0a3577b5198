"""Failures of the earlier attempts of a run, as its history records them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.history_lines import read_log
from holdfast.checkpoint.store import Store

_TRAINERS = ("restored", "saved", "staged", "skipped", "dropped", "ended", "metrics")
"""Events from the trainer's own process."""
_IN_ORDER = ("preempted", "went back", "finished", "closed")
"""Ends that are no failures, as the detail of an event `ended` begins."""
_MAX_ATTEMPTS = 100
_MAX_LOG_BYTES = 16 << 20
"""Largest log that is read at the start of a training."""


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Failures of a run during its training time.

    Attributes:
        num_failures: attempts that ended without a recorded reason, or that hung.
        up_s: time in which the attempts trained, in seconds.
    """

    num_failures: int
    up_s: float

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between failures; None without any."""
        return self.up_s / self.num_failures if self.num_failures and self.up_s > 0 else None


def read_failures(store: Store, *, before: int) -> FailureRate:
    """Return the failures of the newest attempts before one.

    Args:
        before: number of that attempt.

    Blocks: to read the logs of their ranks 0.
    """
    logs: dict[int, str] = {}
    for entry in store.list("history/"):
        found = names.parse_history(entry.name)
        if found is not None and found[1] == 0 and found[0] < before and entry.num_bytes <= _MAX_LOG_BYTES:
            logs[found[0]] = entry.name
    newest = sorted(logs, reverse=True)[:_MAX_ATTEMPTS]
    return count_failures(read_log(store, logs[attempt]) for attempt in newest)


def count_failures(attempts: Iterable[Iterable[Mapping[str, Any]]]) -> FailureRate:
    """Return the failures of ended attempts, from the lines of each one's rank 0."""
    num_failures, up_s = 0, 0.0
    for lines in attempts:
        own = [line for line in lines if line["event"] in _TRAINERS or line["event"] == "persisted"]
        if not own:
            continue  # it never trained
        times = [line["t"] for line in own]
        up_s += max(times) - min(times)
        ends = [str(line.get("detail", "")) for line in own if line["event"] == "ended"]
        num_failures += not any(end.startswith(_IN_ORDER) for end in ends)
    return FailureRate(num_failures, up_s)
