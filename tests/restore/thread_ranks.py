"""Ranks that are threads: values and bytes travel between them as over a network."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.checkpoint.format.messages import pack, unpack
from holdfast.checkpoint.ranks import RankGroup

WAIT_S = 600.0


class Network:
    """Connections between some ranks."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=WAIT_S)
        self.slots: list[Any] = [None] * world_size
        # All at once: two threads that each make the missing one would send into different queues.
        routes = itertools.product(range(world_size), range(world_size))
        self.sent: dict[tuple[int, int], queue.Queue[bytes]] = {route: queue.Queue() for route in routes}


class ThreadRank(RankGroup):
    """One rank's end of a network."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.world_size = network, rank, len(network.slots)

    def gather(self, value: Any) -> list[Any]:
        self.network.slots[self.rank] = pack(value)
        self.network.barrier.wait()
        found = list(self.network.slots)
        self.network.barrier.wait()
        return [unpack(data, f"rank {source}") for source, data in enumerate(found)]

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]

    def send(self, data: torch.Tensor, to: int) -> Any:
        self.network.sent[self.rank, to].put(data.numpy().tobytes())
        return SimpleNamespace(wait=lambda: None)

    def receive(self, data: torch.Tensor, source: int) -> Any:
        def wait() -> None:
            content = self.network.sent[source, self.rank].get(timeout=WAIT_S)
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

        return SimpleNamespace(wait=wait)

    def exchange_flags(self, step: int, flags: tuple[bool, ...], numbers: tuple[int, ...]) -> Any:
        raise AssertionError(f"flags of step {step}")

    def barrier_and_close(self) -> None:
        raise AssertionError("ranks part")


def alone() -> ThreadRank:
    """Return a rank by itself."""
    return ThreadRank(Network(1), 0)


def on_threads(work: Callable[[ThreadRank], Any], world_size: int) -> list[Any]:
    """Call a function on each rank, and return its result or its error, by rank."""
    network = Network(world_size)

    def call(rank: int) -> Any:
        try:
            return work(ThreadRank(network, rank))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(call, range(world_size)))
