"""SkyPilot's word about a managed job as ours; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.documents import Fields, decode
from holdfast.errors import Corrupt, RetryLater
from holdfast.jobs.status import Status

_OURS: Mapping[str, Status] = {
    "SUBMITTED": Status.PENDING,
    "WINDING_DOWN": Status.RUNNING,
    "FAILED_PRECHECKS": Status.FAILED,
    "FAILED_NO_RESOURCE": Status.FAILED,
}
"""Statuses that SkyPilot has and we have not; all others are called the same."""


@dataclass(frozen=True, slots=True)
class Managed:
    """A managed job as `sky jobs queue` tells it."""

    id: str
    name: str
    status: Status
    recoveries: int
    reason: str
    started_unix_s: float | None
    ended_unix_s: float | None


def read_queue(text: str) -> list[Managed]:
    """The jobs in what `sky jobs queue --output json` prints, the newest first.

    Raises:
        RetryLater: it is no such text.
    """
    start = text.find("[")  # words about the server may come before it
    try:
        rows = decode(text[start:], "SkyPilot's queue", max_bytes=64 << 20) if start >= 0 else []
        every = [Fields(row, "a job of SkyPilot") for row in rows]
        return [_read(row) for row in every if "job_id" in row]
    except (Corrupt, ValueError, TypeError) as error:
        raise RetryLater(f"SkyPilot's queue cannot be read: {error} In {text[:200]!r}.") from error


def _read(job: Fields) -> Managed:
    row = job.members
    word = str(row.get("status") or "PENDING").rpartition(".")[2]
    status = _OURS.get(word) or Status(word)
    why = row.get("failure_reason") or row.get("details") or ""
    special = f"{word}: " if word in _OURS and status.is_final else ""
    return Managed(
        str(row["job_id"]),
        str(row.get("job_name") or ""),
        status,
        job.integer("recovery_count") if "recovery_count" in job else 0,
        (special + str(why)).strip(),
        job.number("start_at") if "start_at" in job else None,
        job.number("end_at") if status.is_final and "end_at" in job else None,
    )
