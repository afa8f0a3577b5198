"""Placement of copies: which ranks hold the copies of each rank's files; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct


class RankPlace(Struct, frozen=True):
    """Place of a rank."""

    host: str
    zone: str = ""  # rack, zone or other part of the cluster that can fail as a whole; "" for the host alone


def place_copies(places: Sequence[RankPlace], num_copies: int) -> list[tuple[int, ...]]:
    """Return for each rank the ranks that hold its copies, all on different hosts, and none on its own.

    Copies are in different zones too, where the sizes of the zones allow it. Every host holds the copies of
    as many hosts, so no rank holds more than its share if all hosts have equally many ranks. With fewer
    hosts than copies there are fewer copies.
    """
    on_host: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        on_host.setdefault(place.host, []).append(rank)
    # Invariant: a host's copies are at least `shift` hosts away, around the end of the list too, and hosts
    # of one zone are next to each other. So no zone of at most `shift` hosts holds two copies of a host.
    hosts = sorted(on_host, key=lambda host: (places[on_host[host][0]].zone, on_host[host][0]))
    zones = Counter(places[on_host[host][0]].zone or host for host in hosts)
    num_copies = min(num_copies, len(hosts) - 1)
    largest = max(zones.values())
    shift = largest if largest * (num_copies + 1) <= len(hosts) else len(hosts) // (num_copies + 1)
    holders: list[tuple[int, ...]] = [()] * len(places)
    for index, host in enumerate(hosts):
        others = [hosts[(index + shift * number) % len(hosts)] for number in range(1, num_copies + 1)]
        for number, rank in enumerate(on_host[host]):
            holders[rank] = tuple(on_host[other][number % len(on_host[other])] for other in others)
    return holders


def writers_of(holders: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """Return the ranks whose copies a rank holds."""
    return tuple(writer for writer, those in enumerate(holders) if rank in those)
