"""Terms of the uploads at the end of an attempt: their deadline, and whether the job leaves its machines."""

from __future__ import annotations

import time

from holdfast.jobs.slurm.messages import EndUploads
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.status import JobStatus

_REPORT_S = 5.0
"""Time between the end of uploads and that of the machine, to report and record what is missing."""
_LIMIT_S = 3600.0
"""Time limit for an attempt that has failed and has no other deadline. Until then, it keeps its machines."""


class UploadTerms:
    """Terms for the nodes of one attempt.

    Args:
        policy: policy of the job.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._num_nodes = policy.num_nodes
        self._limit_unix_s: float | None = None
        self._ended_unix_s: float | None = None
        self.sent: EndUploads | None = None
        """The last terms that were sent."""

    def forget_step(self) -> None:
        """Forget what was sent, as other runners take the places of those that received it."""
        self.sent = None

    def limit(self, until_unix_s: float) -> None:
        """Limit the uploads: Slurm is about to take the machines."""
        if self._limit_unix_s is None:
            self._limit_unix_s = until_unix_s

    @property
    def is_limited(self) -> bool:
        """True if Slurm takes the machines after the end of all commands."""
        return self._limit_unix_s is not None

    def take(self, state: JobState, notice_unix_s: float | None, *, leaves: bool) -> EndUploads | None:
        """Return the terms after the end of all commands, or None if they were sent.

        Args:
            notice_unix_s: deadline of the notice that the attempt has received, if any.
            leaves: True if the job does not continue on these machines.
        """
        terms = EndUploads(self._until_unix_s(state, notice_unix_s, leaves=leaves), leaves)
        if terms == self.sent:
            return None
        self.sent = terms
        return terms

    def _until_unix_s(self, state: JobState, notice_unix_s: float | None, *, leaves: bool) -> float | None:
        deadlines = [one - _REPORT_S for one in (self._limit_unix_s, notice_unix_s) if one is not None]
        if deadlines:
            return min(deadlines)
        is_complete = all(one.is_success for one in state.outcomes.values())
        if is_complete and state.status is not JobStatus.CANCELLING:
            return None
        if not leaves:
            return 0.0  # the next attempt begins with the uploads
        self._ended_unix_s = self._ended_unix_s or time.time()
        return self._ended_unix_s + _LIMIT_S
