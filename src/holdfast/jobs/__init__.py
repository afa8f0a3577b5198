"""Jobs: task files, the pure state machine of a job, the engines that run it, and their Python interface."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.jobs.description import JobDescription
    from holdfast.jobs.engine import Job, Line
    from holdfast.jobs.history import Durations, JobAttempt
    from holdfast.jobs.interface import (
        cancel,
        clear_node,
        describe,
        find,
        forget,
        job,
        launch,
        logs,
        nodes,
        preempt,
        queue,
        wait,
    )
    from holdfast.jobs.machines import NodeStanding
    from holdfast.jobs.node.checks.result import Check, NodeChecks
    from holdfast.jobs.notifications import Delivery
    from holdfast.jobs.status import JobStatus

_PLACES = {
    "description": ("JobDescription",),
    "engine": ("Job", "Line"),
    "history": ("Durations", "JobAttempt"),
    "interface": (
        *("cancel", "clear_node", "describe", "find", "forget", "job"),
        *("launch", "logs", "nodes", "preempt", "queue", "wait"),
    ),
    "machines": ("NodeStanding",),
    "node.checks.result": ("Check", "NodeChecks"),
    "notifications": ("Delivery",),
    "status": ("JobStatus",),
}
"""Public names by the file that defines them."""

__all__ = [
    "Check",
    "Delivery",
    "Durations",
    "Job",
    "JobAttempt",
    "JobDescription",
    "JobStatus",
    "Line",
    "NodeChecks",
    "NodeStanding",
    "cancel",
    "clear_node",
    "describe",
    "find",
    "forget",
    "job",
    "launch",
    "logs",
    "nodes",
    "preempt",
    "queue",
    "wait",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: agents and controllers need only their own modules."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"holdfast.jobs.{place}"), name)
    raise AttributeError(f"module 'holdfast.jobs' has no attribute {name!r}")
