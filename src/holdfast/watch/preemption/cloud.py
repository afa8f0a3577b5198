"""The interface of a polled source of notices."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.watch.preemption.notice import Notice


class Cloud(ABC):
    """Source of notices about this machine, of a cloud or a scheduler."""

    name: str
    """The name that users write."""
    pause_s: float
    """Pause between two polls. 0 if the service itself holds a request until its response changes."""

    save_s: float = 0.0
    """Measured time of one step and one durable save, for sources that choose the moment themselves."""

    @abstractmethod
    def poll(self) -> Notice | None:
        """Return the notice for this machine, or None.

        Raises:
            Unreachable: the service did not answer.

        Blocks: for one request, at most for about its `timeout_s`.
        """
