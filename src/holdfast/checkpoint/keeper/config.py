"""Configuration of a keeper, sent once at its start: the run, attempt and rank it serves, and its limits."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.home.listing import WriterId
from holdfast.checkpoint.retention import Keep
from holdfast.system.documents import Count

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a training, but not its keepers: the last save must be completed. SIGKILL stops both."""
OTHER_VERSION_STATUS = 78  # of a keeper of another version than its trainer


class WatchConfig(Struct, frozen=True):
    """Half of a watch that the keeper loads."""

    name: str
    keeper: str  # "module:Class"
    folder: str  # the module is looked for there too
    options: Mapping[str, Any]


class TlsFiles(Struct, frozen=True):
    """Paths of PEM files for TLS between keepers."""

    certificate: str  # of this host, signed by the authority
    key: str
    authority: str  # certificates of the authority that signs for all hosts


class PeerAddress(Struct, frozen=True):
    """Network address of a keeper, and the rank that it serves."""

    rank: Count
    host: str
    port: Count


class PeersConfig(Struct, frozen=True):
    """Peers of a keeper, and what it needs for a conversation with them."""

    secret: str  # of the attempt, in hexadecimal digits; only sent over Unix sockets and between the ranks
    holders: tuple[PeerAddress, ...]  # keepers that hold this rank's copies
    writers: tuple[Count, ...]  # ranks whose copies this keeper holds
    memory_bytes: Count  # for copies of other ranks
    bandwidth: float | None = None  # bytes per second to each holder
    tls: TlsFiles | None = None


class KeeperConfig(Struct, frozen=True):
    """Configuration of the keeper of one rank."""

    home: str
    run: str
    attempt: Count
    rank: Count
    world_size: Count
    all_ranks_here: bool  # every rank of the attempt runs on this host
    keep: Keep  # in home
    commit_timeout_s: float  # time to wait for other ranks' parts while the trainer is alive
    linger_s: float  # the same once the trainer has exited
    claim: str = ""  # document that claimed the attempt; "" to skip the check that it still exists
    local: str | None = None  # folder of the local tier; None to persist saves in home
    local_ranks: tuple[Count, ...] = ()  # ranks that share this local folder; empty for all
    keep_local: Count = 2  # newest checkpoints to keep in the local tier
    bandwidth: float | None = None  # bytes per second that this rank may send home
    compress: bool = False  # what is sent to home, where that is faster
    patience_s: float = 3600.0  # time that home may fail before that is an error
    pause_s: float = 0.0  # time that a save is tried again while training waits for it
    keep_in_memory_s: float = 0.0  # time that file images stay in memory after the trainer's death
    num_retries: Count = 2  # tries after the first, when the store fails
    retry_s: float = 0.5  # pause before the first retry; doubles with each
    healthy_back: Count | None = None  # also keep a healthy checkpoint this many steps before the newest
    watches: tuple[WatchConfig, ...] = ()
    peers: PeersConfig | None = None

    @property
    def writer(self) -> WriterId:
        """Identity of the rank that the keeper serves."""
        return WriterId(self.run, self.attempt, self.rank, self.world_size)

    @property
    def modes(self) -> dict[str, str]:
        """Mode of the metric that the best checkpoints are compared by, for their metrics."""
        return {} if self.keep.metric is None else {self.keep.metric: self.keep.mode}

    @property
    def nearest(self) -> str:
        """Place of the tier that saves are committed in first."""
        return self.home if self.local is None else self.local

    @property
    def persist_bandwidth(self) -> float | None:
        """Limit on the rate of persisting saves, in bytes per second; None for no limit."""
        return self.bandwidth if self.local is None else None

    @property
    def is_node_local(self) -> bool:
        """True if no local folder receives the files of all ranks."""
        return self.local is not None and 0 < len(self.local_ranks) < self.world_size

    def is_responsible_for(self, saved_rank: int) -> bool:
        """Return True if this keeper drains and deletes a saved rank's files."""
        if not self.is_node_local:
            return saved_rank % self.world_size == self.rank
        if saved_rank in self.local_ranks:
            return saved_rank == self.rank
        return self.local_ranks[saved_rank % len(self.local_ranks)] == self.rank
