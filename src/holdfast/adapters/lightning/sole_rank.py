"""Group of one rank, for the only rank of a process group that saves."""

from __future__ import annotations

from typing import TypeVar, final

from typing_extensions import override

from holdfast.checkpoint.ranks import RankGroup

_T = TypeVar("_T")


@final
class SoleRank(RankGroup):
    """One rank that saves by itself: Lightning gives a whole checkpoint to rank 0."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1

    @override
    def gather(self, value: _T) -> list[_T]:
        return [value]

    @override
    def share(self, value: _T) -> _T:
        return value

    @override
    def exchange_flags(
        self, step: int, flags: tuple[bool, ...], numbers: tuple[int, ...]
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Return the values unchanged."""
        return flags, numbers

    @override
    def barrier_and_close(self) -> None:
        """Do nothing."""
