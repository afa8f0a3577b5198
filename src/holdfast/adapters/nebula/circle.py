"""The ranks that save a tag together: they meet at torch.distributed's store, not in collectives."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from holdfast.errors import RetryLater, Unsupported
from holdfast.format.messages import pack, unpack
from holdfast.ranks import RankGroup

_T = TypeVar("_T")
_POLL_S = 0.01


@final
class Circle(RankGroup):
    """Some ranks of a process group, numbered anew in their order.

    They meet by keys of a store and not in collectives, since any thread may come to a meeting while
    training's own collectives run.

    Args:
        store: which all of them reach.
        name: tells this circle apart from all others; alike on its ranks.
        members: ranks of the process group, ascending.
        me: one of them.
        timeout_s: how long to wait for a rank that does not answer.
    """

    def __init__(self, store: Store, name: str, members: Sequence[int], me: int, *, timeout_s: float) -> None:
        self.rank, self.world_size = list(members).index(me), len(members)
        self._store = store
        self._name = name
        self._members = tuple(members)
        self._timeout_s = timeout_s
        self._numbers = itertools.count()

    def gather(self, value: _T) -> list[_T]:
        """See `RankGroup.gather`.

        Blocks: until every rank has called it.
        """
        if self.world_size == 1:
            return [value]
        key = self._next()
        self._store.set(f"{key}/{self.rank}", pack(value).decode())
        return [self._value(f"{key}/{rank}", rank) for rank in range(self.world_size)]

    def share(self, value: _T) -> _T:
        """See `RankGroup.share`.

        Blocks: until rank 0 has called it.
        """
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
        # Any process that reaches the port can write to the store, so this is decoded as from a stranger.
        return unpack(self._wait(key, rank), f"rank {self._members[rank]}")

    def _wait(self, key: str, rank: int) -> bytes:
        """What a rank has put under a key; asked for again and again: a blocking get blocks the store."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline_s:
                message = (
                    f"Rank {self._members[rank]} did not answer within {self._timeout_s:.0f} s: it has died, "
                    "hangs, or has not saved what others wait for. Nothing was saved."
                )
                raise RetryLater(message, rank=self._members[rank])
            time.sleep(_POLL_S)
        return self._store.get(key)

    def exchange_flags(
        self, step: int, flags: tuple[bool, ...], numbers: tuple[int, ...]
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """See `RankGroup.exchange_flags`; only for a rank that is alone.

        Raises:
            Unsupported: there are several.
        """
        if self.world_size > 1:
            message = "Ranks that meet at a store do not agree beside every step."
            raise Unsupported(message)
        return flags, numbers

    def part(self) -> None:
        """See `RankGroup.part`; nobody is ever left in mid-sentence at a store."""

    def send(self, data: torch.Tensor, to: int) -> dist.Work:
        """See `RankGroup.send`.

        Raises:
            Unsupported: always.
        """
        message = "Ranks that meet at a store exchange no tensors."
        raise Unsupported(message)

    def receive(self, data: torch.Tensor, source: int) -> dist.Work:
        """See `RankGroup.receive`.

        Raises:
            Unsupported: always.
        """
        message = "Ranks that meet at a store exchange no tensors."
        raise Unsupported(message)
