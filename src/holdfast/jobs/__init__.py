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


_PLACES = ("status", "engine", "history", "node.checks.result", "machines", "notifications", "description")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: agents and controllers need only their own modules."""
    for place in (*_PLACES, "interface") if name in __all__ else ():
        module = importlib.import_module(f"holdfast.jobs.{place}")
        found = vars(module).get(name)
        if getattr(found, "__module__", None) == module.__name__:  # not a name that the module imports
            return found
    raise AttributeError(f"module 'holdfast.jobs' has no attribute {name!r}")
