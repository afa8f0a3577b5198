"""Batches that divide the data among the ranks themselves, as `GlobalBatches` do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DividedBatches(Protocol):
    """This rank's share of each global batch, with a position that continues on any number of ranks."""

    rank: int
    world_size: int
    batch_size: int
    accumulation_steps: int

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        ...

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the batches of an epoch."""
        ...

    def complete_steps(self, num_steps: int) -> None:
        """Set the number of completed optimizer steps."""
        ...

    def skip(self, start: int, stop: int) -> None:
        """Leave out a range of units."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        ...
