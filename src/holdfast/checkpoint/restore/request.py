"""Request for a restore by all ranks together, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.format.partitioning import FillTarget
from holdfast.checkpoint.format.sections import Section, Sections
from holdfast.checkpoint.home.patience import LIMIT_S
from holdfast.checkpoint.home.rollbacks import NO_ROLLBACKS, Rollbacks
from holdfast.checkpoint.home.skipped import Skipped
from holdfast.checkpoint.ranks import RankGroup
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store.contract import Store


class Loading(Protocol):
    """Plan that fills live objects from one checkpoint. Making it changes nothing live."""

    @property
    def targets(self) -> Mapping[str, Sequence[FillTarget]]:
        """Contiguous tensors of the saved dtypes, with their regions, by saved name."""
        ...

    def finish(self) -> None:
        """Complete the load, once all targets of all ranks are filled and verified."""
        ...


RankFrom = Callable[[int, int, int], int]
"""Function of rank, world size and saved world size that returns the saved rank whose state is loaded."""
StateLoad = Callable[[Manifest, Sequence[Mapping[str, Any]]], Loading]
"""Function that plans the load of a checkpoint from its manifest, this rank's values and those of other
structures."""
Mark = Callable[[Sequence[Skipped], "CheckpointId | None"], None]
"""Function that records which checkpoints were skipped, and deletes the note about the restored one."""


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a restore; the same on all ranks but for the stores and functions of each."""

    store: Store  # home, or all tiers of this rank as one
    load: StateLoad
    group: RankGroup  # ranks that restore; need not be as many as have saved
    step: int | None = None  # restore only this step; the newest attempt that saved it is tried first
    best: Keep | None = None  # restore the best checkpoint by the metric of this policy
    healthy: bool = False  # restore the newest checkpoint that is marked as healthy
    choices: tuple[CheckpointId, ...] | None = None  # restore the newest of these and no other
    num_threads: int | None = None  # threads that read, hash and copy; None for what suits the nearest tier
    on_bytes: Callable[[int], None] | None = None  # called with the size of each read, never by two threads
    share_reads: bool = False  # each chunk is read by one of the ranks that need it, and sent to the others
    source_rank: RankFrom | None = None  # by default a rank loads the state of `rank % saved`
    own_local: Store | None = None  # this rank's local folder, where other ranks have others
    may_commit: bool = True  # write missing manifests; False without a claim, beside a living writer
    show: Callable[[str], None] = _ignore  # called with a line for the user
    patience_s: float = LIMIT_S  # time limit for retries of what cannot be read
    verify: bool = False  # read everything, also what is not loaded; each rank a share of the files
    mark: Mark = _ignore  # called on every rank, and again while it raises RetryLater


@dataclass(frozen=True, slots=True)
class Restored(OfCheckpoint):
    """Restored checkpoint, and those that were skipped for it. Bytes and seconds are this rank's."""

    step: int
    attempt: int
    ancestors: Ancestors
    world_size: int  # ranks that saved it
    num_bytes: int
    seconds: float
    skipped: tuple[Skipped, ...]
    sources: Mapping[str, int]  # bytes by the URL of the tier they came from
    recovered_from: tuple[str, ...]  # damage in nearer copies, of which a farther tier had a good one
    finished: tuple[tuple[CheckpointId, str], ...] = ()  # with the URL where its manifest was written
    whole: tuple[CheckpointId, ...] = ()  # checkpoints that still lack only their manifest
    seen: tuple[CheckpointId, ...] = ()  # everything that could have been restored
    rollbacks: Rollbacks = NO_ROLLBACKS  # of the run
    watches: Sections = field(default_factory=dict[str, Section])  # findings of watches, in its manifest
