"""State entry: the interface of every kind of object in a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from holdfast.checkpoint.state.capture import TensorCollector
from holdfast.checkpoint.state.load import LoadPlan
from holdfast.checkpoint.state.replication import Replication
from holdfast.checkpoint.state.tensor_table import Role


class StateEntry(ABC):
    """An object under a top-level key. Implementations are final.

    Args:
        replication: how ranks hold its tensors, if the user has marked it.
    """

    def __init__(self, key: str, value: Any, replication: Replication | None = None) -> None:
        self.key = key
        self.value = value
        self.replication = replication

    @abstractmethod
    def capture(self, collector: TensorCollector) -> Any:
        """Collect all tensors, and return the entry's encoded values.

        Raises:
            InvalidInput, Unsupported: something in it cannot be saved, named by its key path.
        """

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor, Role]]:
        """Return name, live tensor and role of tensors that are found without user code."""
        return ()

    @abstractmethod
    def plan(self, plan: LoadPlan, put: Callable[[Any], None]) -> None:
        """Plan how the entry is filled from the checkpoint. Changes nothing live.

        Args:
            plan: the plan to extend.
            put: stores a new object under the entry's key, for objects that cannot be changed in place.
        """
