"""Notices of Ray Train about nodes that are reclaimed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from holdfast.watch.preemption.cloud import Cloud
from holdfast.watch.preemption.metadata import Unreachable
from holdfast.watch.preemption.notice import Notice

_CONTEXT = "ray.train.v2._internal.execution.context"


class Ray(Cloud):
    """Source of Ray Train's preemption info, which asks for one save.

    Training continues until Ray ends it: Ray counts workers that exit by themselves as failures, and restarts
    the run on other nodes without counting one that is preempted.

    `ray.train.get_preemption_info` is collective and must be called by the training function, so the value
    is read where it reads it. Source: Ray Train user guide, "Handling failures and node preemption".

    Args:
        read: returns the `PreemptionInfo` of this worker, or None.
    """

    name = "ray"
    pause_s = 0.5

    def __init__(self, read: Callable[[], Any] | None = None) -> None:
        self._read = _read_info if read is None else read
        self._nodes: frozenset[str] = frozenset()

    @override
    def poll(self) -> Notice | None:
        info = self._read()
        if info is None:
            return None
        nodes = frozenset(map(str, info.preempted_node_to_ranks))
        if nodes <= self._nodes:
            return None
        self._nodes |= nodes
        deadline_s = info.deadline_ms / 1000 if info.deadline_ms else None
        return Notice("ray", "a node is reclaimed", deadline_s, is_final=False)


def is_worker() -> bool:
    """Return True in a process of Ray Train's that runs a training function."""
    return _context() is not None


def _read_info() -> Any:
    context = _context()
    try:
        return None if context is None else context.preemption_context.preemption_info
    except AttributeError as error:
        raise Unreachable(f"this version of Ray Train has no preemption info: {error}") from error


def _context() -> Any:
    """Return Ray Train's context of this process, or None. Does not import Ray."""
    return getattr(sys.modules.get(_CONTEXT), "_train_context", None)
