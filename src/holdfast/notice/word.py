"""What a preemption notice says: who gives it, why, and until when the machine stays."""

from __future__ import annotations

import datetime
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """One notice."""

    source: str  # who says so: "SIGTERM", "aws", "holdfast preempt"
    detail: str = ""
    deadline_unix_s: float | None = None  # when the machine goes; None: nobody said
    is_final: bool = True  # False: it may go soon, so save, and go on

    @property
    def reason(self) -> str:
        """In a few words."""
        return f"{self.source}: {self.detail}" if self.detail else self.source


def read_time(text: str) -> float | None:
    """Seconds since 1970 of a moment as clouds write it (ISO 8601 or RFC 1123); None if it cannot be read."""
    text = text.strip()
    for form in ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S.%fZ", "%a, %d %b %Y %H:%M:%S GMT"):
        try:
            moment = datetime.datetime.strptime(text, form)
        except ValueError:
            continue
        return moment.replace(tzinfo=datetime.timezone.utc).timestamp()
    return None
