"""The statuses of a job, named as SkyPilot names them, so that scripts need no other words."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """Where a job stands."""

    PENDING = "PENDING"  # submitted, no process started
    STARTING = "STARTING"  # the first attempt is being set up
    RUNNING = "RUNNING"  # `run` has been started on every node
    WINDING_DOWN = "WINDING_DOWN"  # `run` is done, and what it wrote is not all in its bucket
    RECOVERING = "RECOVERING"  # an attempt has ended before its time, the next has not come to `run`
    CANCELLING = "CANCELLING"  # told to stop, processes are left
    SUCCEEDED = "SUCCEEDED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"  # `run` failed, more often than is allowed
    FAILED_SETUP = "FAILED_SETUP"  # `setup` failed
    FAILED_CONTROLLER = "FAILED_CONTROLLER"  # what looks after the job could not go on

    @property
    def is_final(self) -> bool:
        """True if nothing will happen to the job any more."""
        return self in FINAL


FINAL = frozenset(
    {
        Status.SUCCEEDED,
        Status.CANCELLED,
        Status.FAILED,
        Status.FAILED_SETUP,
        Status.FAILED_CONTROLLER,
    }
)
"""Statuses that stay."""
