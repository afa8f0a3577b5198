"""Configuration of a keeper, sent once at its start: the run, attempt and rank it serves, and its limits."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass

from holdfast.documents import decode_dataclass
from holdfast.home.writer import WriterId
from holdfast.policy import Keep

# Whoever stops a run wants its last save finished, so what stops trainers does not stop keepers. SIGKILL
# does.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class KeeperConfig:
    """Which run, attempt and rank a keeper serves, and within which limits."""

    home: str
    run: str
    attempt: int
    rank: int
    world_size: int
    all_ranks_here: bool  # every rank of the attempt runs on this host
    keep_last: int | None
    keep_every: int | None
    commit_timeout_s: float  # how long to wait for other ranks' parts while the trainer lives
    linger_s: float  # the same once the trainer is gone
    claim: str = ""  # the document by which the attempt was claimed; "" leaves out the check that it stands
    local: str | None = None  # folder of the near tier; None: saves are persisted straight to home
    local_ranks: tuple[int, ...] = ()  # ranks whose local folder is this one; empty: all
    keep_local: int = 2  # how many of the newest checkpoints stay there
    bandwidth: float | None = None  # bytes per second that this rank may send home
    patience_s: float = 3600.0  # how long home may fail before that is an error
    hold_s: float = 0.0  # how long what is in memory is offered to the next attempt after the trainer's death
    num_retries: int = 2  # tries after the first, when the store fails
    retry_s: float = 0.5  # pause before the first of them; doubles
    keep_best: int | None = None  # how many of the best checkpoints stay in home
    keep_metric: str | None = None  # by which metric
    keep_mode: str = "min"

    @property
    def writer(self) -> WriterId:
        """Identity of the rank that it serves."""
        return WriterId(self.run, self.attempt, self.rank, self.world_size)

    @property
    def keep(self) -> Keep:
        """Retention policy of home."""
        return Keep(self.keep_last, self.keep_every, self.keep_best, self.keep_metric, self.keep_mode)

    @property
    def near(self) -> str:
        """Where saves are committed first."""
        return self.home if self.local is None else self.local

    @property
    def straight_bandwidth(self) -> float | None:
        """Bytes per second at which saves may be persisted, where that is in home already."""
        return self.bandwidth if self.local is None else None

    @property
    def is_scattered(self) -> bool:
        """True if no local folder gets the files of all ranks."""
        return self.local is not None and 0 < len(self.local_ranks) < self.world_size

    def is_mine(self, saved_rank: int) -> bool:
        """True if this rank's keeper looks after the files of a rank that saved, perhaps in another world."""
        if not self.is_scattered:
            return saved_rank % self.world_size == self.rank
        if saved_rank in self.local_ranks:
            return saved_rank == self.rank
        return self.local_ranks[saved_rank % len(self.local_ranks)] == self.rank

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> KeeperConfig:
        """Return the terms in a line of JSON.

        Raises:
            Corrupt: they are no terms.
        """
        return decode_dataclass(cls, text, "the terms of a keeper", any_text=True)
