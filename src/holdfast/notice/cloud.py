"""The interface of a cloud's source of notices, which a thread polls."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.notice.preemption import Notice


class Cloud(ABC):
    """Source of one cloud's notices about this machine."""

    name: str
    """The name that users write."""
    pause_s: float
    """Pause between two polls. 0 if the service itself holds a request until its response changes."""

    @abstractmethod
    def poll(self) -> Notice | None:
        """Return the notice for this machine, or None.

        Raises:
            Unreachable: the service did not answer.

        Blocks: for one request, at most for about its `timeout_s`.
        """
