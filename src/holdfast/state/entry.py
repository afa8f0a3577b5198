"""One entry of a state: what every kind of object must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from holdfast.state.capture import Sink
from holdfast.state.load import Plan
from holdfast.state.spread import Spread
from holdfast.state.table import Role


class Entry(ABC):
    """An object under a top-level key. Implementations are final.

    Args:
        key: the top-level key.
        value: the object.
        spread: how its tensors are spread over the ranks, if the user has said so.
    """

    def __init__(self, key: str, value: Any, spread: Spread | None = None) -> None:
        self.key = key
        self.value = value
        self.spread = spread

    @abstractmethod
    def capture(self, sink: Sink) -> Any:
        """Give all tensors to the sink; answers the entry's encoded values.

        Raises:
            InvalidInput, Unsupported: something in it cannot be saved, named by its key path.
        """

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor, Role]]:
        """Name, live tensor and role of those tensors that are known without running anybody's code."""
        return ()

    @abstractmethod
    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """Plan how the entry is filled from the checkpoint; changes nothing live.

        Args:
            plan: the plan to add to.
            put: stores a new object under the entry's key, for those that cannot be changed in place.
        """
