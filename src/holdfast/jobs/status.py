"""Statuses of a job, with SkyPilot's names, so that scripts work with both."""

from __future__ import annotations

from enum import Enum


class JobStatus(str, Enum):
    """Status of a job."""

    PENDING = "PENDING"  # submitted, no process started
    STARTING = "STARTING"  # the first attempt is starting
    RUNNING = "RUNNING"  # `run` has been started on every node
    WINDING_DOWN = "WINDING_DOWN"  # `run` is complete, but some of its files are not in the bucket yet
    RECOVERING = "RECOVERING"  # an attempt has ended early, and the next has not started `run`
    CANCELLING = "CANCELLING"  # cancelled, but processes are left
    SUCCEEDED = "SUCCEEDED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"  # `run` failed more often than allowed
    FAILED_SETUP = "FAILED_SETUP"  # `setup` failed
    FAILED_CONTROLLER = "FAILED_CONTROLLER"  # the controller could not continue

    @property
    def is_final(self) -> bool:
        """True if the job has ended."""
        return self in FINAL


FINAL = frozenset(
    {
        JobStatus.SUCCEEDED,
        JobStatus.CANCELLED,
        JobStatus.FAILED,
        JobStatus.FAILED_SETUP,
        JobStatus.FAILED_CONTROLLER,
    }
)
"""Statuses that never change."""
