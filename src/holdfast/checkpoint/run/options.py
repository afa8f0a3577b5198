"""Options of a Checkpointer: values that group the settings of one concern, checked when they are made.

The first field is what most users set. The Checkpointer also accepts it alone: `home="s3://b/run"` is
`home=Home("s3://b/run")`.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from msgspec import Struct

from holdfast.checkpoint.keeper.config import TlsFiles
from holdfast.checkpoint.policy import Every, every
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.watch import Watch
from holdfast.errors import InvalidInput
from holdfast.system.environment import KEEP_IN_MEMORY
from holdfast.system.units import Duration, parse_bytes, parse_duration

_NO_LIMIT_S = 1e9  # 30 years: a keeper's configuration is JSON, which has no infinity


@dataclass(frozen=True, slots=True)
class Home:
    """Folder or URL of a run's checkpoints, and the rules for copying saves there.

    Args:
        url: path or URL; one run, one home.
        every: with `local`, which saves are copied to home: steps (500), a duration ("10m"), a policy, or
            None for all. The newest save is always copied at the end, and by `wait`.
        bandwidth: bytes per second that each rank may send, or as "200MB"; None for no limit. Without `local`
            a save becomes durable only in home, and occupies its staging memory until then.
        compress: with `local` and a bucket, send files without loss of a bit in a compressed form where that
            is faster than to send them as they are. Only Holdfast reads this form; `holdfast export` writes
            plain files.
    """

    url: str | os.PathLike[str]
    _: KW_ONLY
    every: int | str | datetime.timedelta | Every | None = None
    bandwidth: int | str | None = None
    compress: bool = False

    def __post_init__(self) -> None:
        if self.every is not None:
            every(self.every)
        _ = self.bandwidth_bytes  # a value that cannot be parsed is refused here, as below

    @property
    def bandwidth_bytes(self) -> int | None:
        """Bytes per second that each rank may send; None for no limit."""
        return None if self.bandwidth is None else parse_bytes(self.bandwidth, "Home(bandwidth=)")


@dataclass(frozen=True, slots=True)
class Local:
    """Folder on each host's fast disk, for a home that is slow or far.

    Saves are durable there first, and are copied to home in the background. Each host has its own.

    Args:
        path: folder on this host.
        keep: number of newest checkpoints to keep there.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    keep: int = 2

    def __post_init__(self) -> None:
        _check_count(self.keep, "Local(keep=)")


@dataclass(frozen=True, slots=True)
class Memory:
    """Staging memory of one rank: saves are copied there first, and written from it in the background.

    Args:
        limit: largest size, in bytes or as "8GiB".
        keep_for: how long the last save stays in memory for the next start on this host when this process
            dies; 0 for not at all. By default the value of HOLDFAST_KEEP_IN_MEMORY, else "2m".
        when_full: what `save` does when earlier saves still use all of it: "wait" or "skip". By default it
            waits for a disk, and skips where saves go straight to a bucket, which may not answer for minutes.
    """

    limit: int | str = "8GiB"
    _: KW_ONLY
    keep_for: Duration | None = None
    when_full: str | None = None

    def __post_init__(self) -> None:
        _ = self.limit_bytes, self.keep_for_s
        if self.when_full is not None:
            _check_choice(self.when_full, "Memory(when_full=)", ("wait", "skip"))

    @property
    def limit_bytes(self) -> int:
        """Largest size, in bytes."""
        return parse_bytes(self.limit, "Memory(limit=)")

    def skips_when_full(self, *, is_far: bool) -> bool:
        """Return True if saves are skipped while the memory is full; if `is_far`, they go to a bucket."""
        return is_far if self.when_full is None else self.when_full == "skip"

    @property
    def keep_for_s(self) -> float:
        """Seconds that the last save stays in memory after the death of its process."""
        return _keep_for_s(self.keep_for, "Memory(keep_for=)", "2m")


@dataclass(frozen=True, slots=True)
class Peers:
    """Copies of each rank's saves in the memory of other hosts, which survive the loss of a host.

    Their keepers send them to each other, beside training, and check every byte.

    Args:
        copies: hosts that hold a copy of each rank's files, beside its own.
        keep_for: how long the copies stay in memory for the next start when training dies, as until a new
            host is found. By default the value of HOLDFAST_KEEP_IN_MEMORY, else "15m".
        zone: rack or zone of this host. Copies of a host are in other zones, where that is possible.
        memory: largest size of the copies that each rank's keeper holds for others, in bytes or as "8GiB".
        bandwidth: bytes per second that each rank may send to each host, or as "1GB"; None for no limit.
        address: address of this host for the others; by default the one on its way to MASTER_ADDR.
        tls: paths of three PEM files for TLS: the certificate of this host, its key, and the certificate of
            the authority that has signed those of all hosts. Without it the bytes can be read on the way.
    """

    copies: int = 1
    _: KW_ONLY
    keep_for: Duration | None = None
    zone: str = ""
    memory: int | str = "8GiB"
    bandwidth: int | str | None = None
    address: str | None = None
    tls: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        _check_count(self.copies, "Peers(copies=)")
        _ = self.memory_bytes, self.bandwidth_bytes, self.keep_for_s
        for path in self.tls or ():
            if not Path(path).is_file():
                raise InvalidInput(f"Peers(tls=) names {path!r}, which is not a file.")

    @property
    def keep_for_s(self) -> float:
        """Seconds that the copies stay in memory after the death of the training."""
        return _keep_for_s(self.keep_for, "Peers(keep_for=)", "15m")

    @property
    def memory_bytes(self) -> int:
        """Largest size of the copies of other ranks, in bytes."""
        return parse_bytes(self.memory, "Peers(memory=)")

    @property
    def bandwidth_bytes(self) -> int | None:
        """Bytes per second to each host; None for no limit."""
        return None if self.bandwidth is None else parse_bytes(self.bandwidth, "Peers(bandwidth=)")

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files for TLS, for a keeper."""
        return None if self.tls is None else TlsFiles(*(str(Path(path).absolute()) for path in self.tls))


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of a restore.

    Args:
        patience: how long `restore` retries what cannot be read, before it raises. A checkpoint that cannot
            be read may be whole, so no older one is restored in its place.
        threads: number of parallel reads; by default what suits the storage.
        shared: read what several ranks need once, and send it from rank to rank: for a home that is slower
            than the network between the ranks.
    """

    _: KW_ONLY
    patience: Duration = "2m"
    threads: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        _ = self.patience_s
        if self.threads is not None:
            _check_count(self.threads, "Reads(threads=)")

    @property
    def patience_s(self) -> float:
        """Longest time of retries, in seconds."""
        return _duration_or_zero(self.patience, "Reads(patience=)")


@dataclass(frozen=True, slots=True)
class Limits:
    """Response to failed saves, and limits after which a run raises instead of training on.

    With "pause" a `save` first waits until the one before is durable, on all ranks, so that training is never
    more than one save ahead of what it can resume from.

    Args:
        failed_saves: response to a failed save, whatever the cause, such as a full disk, refused access or a
            store that is away: "warn" and train on; "pause" the training until the save is durable, which
            the keeper tries again; or "raise" the error.
        patience: how long saves may fail in a row, from the call of the first one, before the error is raised
            with "warn" and "pause" too; None for no limit. With `local`, also how long home may fail.
        commit_timeout: how long a rank's keeper waits for the other ranks' parts of a save.
        rank_timeout: how long a rank waits for the others in `restore` and `should_save`.
    """

    _: KW_ONLY
    failed_saves: str = "warn"
    patience: Duration | None = "1h"
    commit_timeout: Duration = "10m"
    rank_timeout: Duration = "1h"

    def __post_init__(self) -> None:
        _check_choice(self.failed_saves, "Limits(failed_saves=)", ("warn", "pause", "raise"))
        _ = self.patience_s, self.commit_timeout_s, self.rank_timeout_s

    @property
    def patience_s(self) -> float:
        """Longest time of failures, in seconds; 0 to raise the first one."""
        limit_s = _NO_LIMIT_S if self.patience is None else parse_duration(self.patience, "Limits(patience=)")
        return 0.0 if self.failed_saves == "raise" else limit_s

    @property
    def pause_s(self) -> float:
        """Longest pause of the training, in seconds; 0 for none."""
        return self.patience_s if self.failed_saves == "pause" else 0.0

    @property
    def commit_timeout_s(self) -> float:
        """Longest wait for the other ranks' parts, in seconds."""
        return parse_duration(self.commit_timeout, "Limits(commit_timeout=)")

    @property
    def rank_timeout_s(self) -> float:
        """Longest wait for the other ranks, in seconds."""
        return parse_duration(self.rank_timeout, "Limits(rank_timeout=)")


class Options(Struct, frozen=True, kw_only=True):
    """All options of a Checkpointer but its state and group, parsed."""

    home: Home
    policies: tuple[Every, ...]  # a save is due when any of them is
    keep: Keep
    local: Local | None
    memory: Memory
    peers: Peers | None
    reads: Reads
    limits: Limits
    watches: tuple[Watch, ...]
    take_over: bool
    quiet: bool


def parse_home(value: str | os.PathLike[str] | Home) -> Home:
    """Return the value of a `home=` argument."""
    return value if isinstance(value, Home) else Home(value)


def _keep_for_s(value: Duration | None, name: str, default: str) -> float:
    if value is not None:
        return _duration_or_zero(value, name)
    return _duration_or_zero(os.environ.get(KEEP_IN_MEMORY, "").strip() or default, KEEP_IN_MEMORY)


def _duration_or_zero(value: Duration, name: str) -> float:
    return 0.0 if value in (0, "0") else parse_duration(value, name)


def _check_count(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{name} must be a whole number from 1, got {value!r:.100}.")


def _check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(choices)}, got {value!r:.100}.")
