"""A preemption notice: its source, its reason, and the machine's deadline."""

from __future__ import annotations

import datetime
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Notice:
    """Notice that this machine will be reclaimed, or may be."""

    source: str  # such as "SIGTERM", "aws", "holdfast preempt"
    detail: str = ""
    deadline_unix_s: float | None = None  # the machine's end, if the source gives it
    is_final: bool = True  # False: the machine may be reclaimed soon, so save once and continue

    @property
    def reason(self) -> str:
        """Source and detail in a few words."""
        return f"{self.source}: {self.detail}" if self.detail else self.source


def parse_time(text: str) -> float | None:
    """Parse a time in ISO 8601 or RFC 1123 format into Unix time. Return None if it is neither."""
    text = text.strip()
    for form in ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S.%fZ", "%a, %d %b %Y %H:%M:%S GMT"):
        try:
            moment = datetime.datetime.strptime(text, form)
        except ValueError:
            continue
        return moment.replace(tzinfo=datetime.timezone.utc).timestamp()
    return None
