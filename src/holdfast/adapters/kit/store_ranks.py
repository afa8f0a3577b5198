"""Ranks that save together beside the collectives of a training: they exchange values through a store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from holdfast.checkpoint.format.messages import pack, unpack
from holdfast.checkpoint.ranks import RankGroup
from holdfast.errors import RetryLater, Unsupported

_T = TypeVar("_T")
_POLL_S = 0.01


@final
class StoreRanks(RankGroup):
    """Some ranks of a process group, renumbered in their order.

    They exchange values by keys of a store and not by collectives, because any thread may communicate while
    training's own collectives run. A rank by itself needs no store.
    """

    def __init__(self, store: Store, name: str, members: Sequence[int], me: int, *, timeout_s: float) -> None:
        self.rank, self.world_size = list(members).index(me), len(members)
        self._store, self._name, self._members, self._timeout_s = store, name, tuple(members), timeout_s
        self._numbers = itertools.count()

    @override
    def gather(self, value: _T) -> list[_T]:
        if self.world_size == 1:
            return [value]
        key = self._next()
        self._store.set(f"{key}/{self.rank}", pack(value).decode())
        return [self._value(f"{key}/{rank}", rank) for rank in range(self.world_size)]

    @override
    def share(self, value: _T) -> _T:
        if self.world_size == 1:
            return value
        key = self._next()
        if self.rank == 0:
            self._store.set(key, pack(value).decode())
            return value
        return self._value(key, 0)

    def _next(self) -> str:
        return f"{self._name}/{next(self._numbers)}"

    def _value(self, key: str, rank: int) -> Any:
        member = self._members[rank]
        value = wait_for(self._store, key, self._timeout_s)
        if value is None:
            raise RetryLater(
                f"Rank {member} did not respond within {self._timeout_s:.0f} s: it has died, hangs, or has "
                "not saved its files. Nothing was saved.",
                rank=member,
            )
        # Any process that reaches the port can write to the store, so its values are not trusted.
        return unpack(value, f"rank {member}")

    @override
    def exchange_flags(
        self, step: int, flags: tuple[bool, ...], numbers: tuple[int, ...]
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Return the values unchanged. Only a single rank may call it."""
        if self.world_size > 1:
            raise Unsupported("Ranks that communicate by a store do not exchange values at every step.")
        return flags, numbers

    @override
    def barrier_and_close(self) -> None:
        """Do nothing: ranks do not wait for each other at a store."""


def wait_for(store: Store, key: str, timeout_s: float) -> bytes | None:
    """Return the value of a key once it is set; None after the timeout. A blocking get blocks the store."""
    deadline_s = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_POLL_S)
    return store.get(key)


def sole_rank() -> StoreRanks:
    """Return the group of one rank that saves by itself, whatever process group it is in."""
    own: Any = dist  # torch exports HashStore, but not in its type stubs
    return StoreRanks(own.HashStore(), "", (0,), 0, timeout_s=0.0)
