"""SkyPilot's managed jobs, and their statuses; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.errors import Corrupt, RetryLater
from holdfast.jobs.status import JobStatus
from holdfast.system.documents import Fields, decode

_OURS: Mapping[str, JobStatus] = {
    "SUBMITTED": JobStatus.PENDING,
    "WINDING_DOWN": JobStatus.RUNNING,
    "FAILED_PRECHECKS": JobStatus.FAILED,
    "FAILED_NO_RESOURCE": JobStatus.FAILED,
}
"""Statuses of SkyPilot that Holdfast does not have. All others have the same names."""


@dataclass(frozen=True, slots=True)
class ManagedJob:
    """Managed job of `sky jobs queue`."""

    id: str
    name: str
    status: JobStatus
    recoveries: int
    reason: str
    started_unix_s: float | None
    ended_unix_s: float | None


def parse_queue(text: str) -> list[ManagedJob]:
    """Parse the output of `sky jobs queue --output json`, newest job first.

    Raises:
        RetryLater: the text is invalid.
    """
    start = text.find("[")  # messages about the server may precede it
    try:
        rows = decode(text[start:], "SkyPilot's queue", max_bytes=64 << 20) if start >= 0 else []
        every = [Fields(row, "a job of SkyPilot") for row in rows]
        return [_read(row) for row in every if "job_id" in row]
    except (Corrupt, ValueError, TypeError) as error:
        raise RetryLater(f"Cannot parse SkyPilot's queue: {error} In {text[:200]!r}.") from error


def _read(job: Fields) -> ManagedJob:
    row = job.members
    word = str(row.get("status") or "PENDING").rpartition(".")[2]
    status = _OURS.get(word) or JobStatus(word)
    why = row.get("failure_reason") or row.get("details") or ""
    special = f"{word}: " if word in _OURS and status.is_final else ""
    return ManagedJob(
        str(row["job_id"]),
        str(row.get("job_name") or ""),
        status,
        job.integer("recovery_count") if "recovery_count" in job else 0,
        (special + str(why)).strip(),
        job.number("start_at") if "start_at" in job else None,
        job.number("end_at") if status.is_final and "end_at" in job else None,
    )
