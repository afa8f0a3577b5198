"""Mirroring of an attempt: which saves the peers of each rank copy, and which ranks are its peers."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.keeper.config import KeeperConfig, PeerAddress, PeersConfig
from holdfast.checkpoint.ranks import RankGroup, this_host, values_of
from holdfast.checkpoint.run.options import Peers
from holdfast.errors import InvalidInput
from holdfast.system.log import get_logger


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


_log = get_logger("checkpoint.run")
_FAILED, _PENDING, _HELD, _NONE = range(4)
"""What a rank sends about the save that peers copy. The lowest of all ranks counts."""


class Mirroring:
    """One rank's side of choosing the saves that peers copy. The keeper's thread reports their outcome.

    One save is copied at a time, the same on all ranks. Once all ranks have exchanged that its copies are
    whole, the copies of the one before are dropped. So the copies of one save are whole on all hosts at any
    time, also while a host dies.
    """

    def __init__(self, options: Peers) -> None:
        self._options = options
        self._listener: socket.socket | None = None  # on which the peers call this rank's keeper
        self.held: int | None = None  # newest step whose copies are known to be whole for all ranks
        self._current: int | None = None  # step that is being copied
        self._state = _NONE  # of the current one, on this rank
        self._was_sent = False  # the ranks exchange its state
        self._began_s = self.took_s = 0.0  # begin of the current one, and duration of the last copy
        self._lock = threading.Lock()

    def meet(self, ranks: RankGroup, config: KeeperConfig) -> tuple[KeeperConfig, dict[str, Any]]:
        """Agree on the peers of each rank. Return the keeper's configuration and arguments with its own.

        Ranks: collective.
        """
        met = meet_peers(ranks, self._options)
        if met is None:
            return config, {}
        peers, self._listener = met
        keep_s = max(config.keep_in_memory_s, self._options.keep_for_s)
        config = replace(config, peers=peers, keep_in_memory_s=keep_s)
        return config, {"copied": self.end, "listener": self._listener}

    def close(self) -> None:
        """Close the socket on which peers call; that of a running keeper stays open."""
        if self._listener is not None:
            self._listener.close()

    def begin(self, step: int) -> bool:
        """Return True if peers are to copy the save of `step`, which begins."""
        with self._lock:
            if self._current is not None and not self._was_sent and self._state != _PENDING:
                self._settle(self._state)  # of a loop without exchanges: each rank has its own outcome only
            if self._current is not None:
                return False
            self._current, self._state, self._was_sent = step, _PENDING, False
            self._began_s = time.monotonic()
            return True

    def end(self, step: int, is_held: bool) -> None:
        """Record whether all peers of this rank hold the copy of a save."""
        with self._lock:
            if step == self._current:
                self._state = _HELD if is_held else _FAILED
                self.took_s = time.monotonic() - self._began_s

    def propose(self) -> tuple[int | None, int]:
        """Return the step that is being copied, and the number to send about it."""
        with self._lock:
            self._was_sent = True
            return self._current, _NONE if self._current is None else self._state

    def receive(self, step: int | None, lowest: int) -> bool:
        """Process the outcome of an exchange about `step`. Return True if it has settled the copies."""
        with self._lock:
            if step is None or step != self._current or lowest not in (_FAILED, _HELD):
                return False
            self._settle(lowest)
            return True

    def _settle(self, state: int) -> None:
        self.held = self._current if state == _HELD else self.held
        self._current, self._state = None, _NONE

    @property
    def kept(self) -> list[int]:
        """Steps whose copies are needed."""
        with self._lock:
            return [step for step in (self.held, self._current) if step is not None]


def meet_peers(ranks: RankGroup, options: Peers) -> tuple[PeersConfig, socket.socket] | None:
    """Agree on who holds whose copies; None if all ranks are on one host.

    Returns:
        The peers of this rank's keeper, and the socket on which others call it.

    Ranks: collective.
    """
    places = [RankPlace(*row) for row in ranks.gather(("|".join(this_host()), options.zone))]
    holders = place_copies(places, options.copies)
    num_copies = len(holders[0])
    if num_copies < options.copies and ranks.rank == 0:
        _log.warning(
            f"Peers({options.copies}) needs ranks on {options.copies + 1} hosts, and they are on "
            f"{num_copies + 1}: each save has {num_copies} copies in memory of other hosts."
        )
    if not num_copies:
        return None
    secret = ranks.share(secrets.token_hex(32))
    listener, address = _listen(ranks, options)
    addresses = [PeerAddress(rank, *row) for rank, row in enumerate(ranks.gather(address))]
    config = PeersConfig(
        secret=secret,
        holders=tuple(addresses[rank] for rank in holders[ranks.rank]),
        writers=writers_of(holders, ranks.rank),
        memory_bytes=options.memory_bytes,
        bandwidth=options.bandwidth_bytes,
        tls=options.tls_files,
    )
    return config, listener


def _listen(ranks: RankGroup, options: Peers) -> tuple[socket.socket, tuple[str, int]]:
    """Return a listening socket, and its address as other hosts see it.

    Ranks: collective.
    """
    own = options.address or _address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())
    found = ranks.gather(own)
    others = [address for address in found if not _is_loopback(address)]
    if _is_loopback(own) and others and not options.address:
        own = _address_towards(others[0])  # the name of the first host often means itself there

    def listen() -> socket.socket:
        try:
            family = socket.getaddrinfo(own, 0, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((own, 0), family=family)
        except OSError as error:
            raise InvalidInput(
                f"Rank {ranks.rank} cannot listen for its peers at {own}: {error.strerror}. Nothing was "
                "saved. Give Peers(address=) an address of this host that the other hosts reach."
            ) from error

    found_here: list[socket.socket] = []
    outcomes = ranks.agree(lambda: found_here.append(listen()))
    values_of(outcomes, ranks.rank, "cannot listen for its peers")
    return found_here[0], (own, found_here[0].getsockname()[1])


def _address_towards(host: str) -> str:
    """Return the address of this host on its way to another one. Sends nothing."""
    try:
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:  # the name is not known here
        return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
