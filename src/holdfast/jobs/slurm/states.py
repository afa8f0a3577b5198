"""Where a job stands, from what its controller wrote down and what Slurm says; pure."""

from __future__ import annotations

import dataclasses

from holdfast.jobs.machine import Life
from holdfast.jobs.slurm.commands import Queued
from holdfast.jobs.status import Status

_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
_THERE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
_SOON_AGAIN = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
"""Slurm puts these back into the queue by itself, a moment later."""


def stand(life: Life, queued: Queued | None, *, is_cancelled: bool, output: str) -> Life:
    """Where a job stands.

    Args:
        life: as the job's controller has written it down; final is what it says is final.
        queued: what Slurm says; None if it knows the job no more.
        is_cancelled: somebody has asked for its end.
        output: file in which more may stand, for messages.
    """
    if life.status.is_final:
        return life
    if queued is not None and queued.state in _WAITING | _SOON_AGAIN:
        return _waiting(life, queued, is_cancelled=is_cancelled)
    if queued is not None and queued.state in _THERE:
        status = Status.STARTING if life.status is Status.PENDING else life.status
        return dataclasses.replace(life, status=status)
    return _ended(life, queued, is_cancelled=is_cancelled, output=output)


def _waiting(life: Life, queued: Queued, *, is_cancelled: bool) -> Life:
    if is_cancelled:
        return dataclasses.replace(life, status=Status.CANCELLING, reason="cancelled")
    status = Status.RECOVERING if life.attempt else Status.PENDING
    why = f"waits in Slurm ({queued.reason})" if queued.reason not in ("", "None") else "waits in Slurm"
    before = f"{life.reason}; " if life.reason else ""
    return dataclasses.replace(life, status=status, reason=before + why)


def _ended(life: Life, queued: Queued | None, *, is_cancelled: bool, output: str) -> Life:
    """Slurm has ended it, and its controller had no time to say so."""
    state = "knows it no more" if queued is None else f"says {queued.state}"
    if is_cancelled or (queued is not None and queued.state.startswith("CANCELLED")):
        reason = "cancelled" if is_cancelled else "cancelled in Slurm"
        return dataclasses.replace(life, status=Status.CANCELLED, is_active=False, reason=reason)
    heard = (
        "the job's controller did not say how it ended"
        if life.attempt
        else "nothing was ever heard from its nodes: is the folder on a file system that they share "
        "(HOLDFAST_STATE), and Python at the same path there?"
    )
    reason = f"Slurm {state}, and {heard} (see {output})"
    return dataclasses.replace(life, status=Status.FAILED_CONTROLLER, is_active=False, reason=reason)
