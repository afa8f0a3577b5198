"""Components of a Checkpointer that all its attempts share: tiers, ranks, pipeline, cadence, metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import MutableMapping
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import run as runs
from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.checkpoint.ranks import RankGroup, Ranks, check_versions
from holdfast.checkpoint.run.cadence import Cadence, HomeCadence
from holdfast.checkpoint.run.metrics import MetricsBuffer
from holdfast.checkpoint.run.options import Options
from holdfast.checkpoint.run.pipeline import MIN_ARENAS_WITH_PEERS, Pipeline
from holdfast.checkpoint.run.tiers import Tiers
from holdfast.checkpoint.run.watching import Watching
from holdfast.checkpoint.state import State
from holdfast.checkpoint.state.loader_watch import watch_loaders
from holdfast.checkpoint.state.review import refuse_snapshots
from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError
from holdfast.system.log import get_logger

_log = get_logger("checkpoint.run")


class Components(Struct, frozen=True):
    """Components of a Checkpointer that outlive its attempts."""

    options: Options
    tiers: Tiers
    ranks: RankGroup
    pipeline: Pipeline
    cadence: Cadence
    metrics: MetricsBuffer
    done: DoneMarker
    pulse: Pulse
    watching: Watching
    has_state: bool  # otherwise each save brings its own

    @classmethod
    def make(
        cls, options: Options, state: MutableMapping[str, Any] | None, group: RankGroup | None
    ) -> Components:
        """Return the components of one Checkpointer, as it was made with a state and a group, or without."""
        tiers = Tiers(options.home, options.local)
        refuse_snapshots(state or {})
        watch_loaders()  # here, since its scan would make the first save slow
        world = None if group is None else (group.rank, group.world_size)
        objects = State({} if state is None else state, world=world)
        ranks: RankGroup = group or Ranks(timeout_s=options.limits.rank_timeout_s)
        check_versions(ranks)
        metrics, now_s, watching = MetricsBuffer(), time.monotonic(), Watching(options.watches)
        pipeline = Pipeline(
            objects,
            ranks,
            metrics,
            memory_bytes=options.memory.limit_bytes,
            skips_when_full=options.memory.skips_when_full(is_far=tiers.is_far),
            min_arenas=1 if options.peers is None else MIN_ARENAS_WITH_PEERS,
            watching=watching,
        )
        policies, home = (*options.policies, *watching.policies), HomeCadence(tiers.home_every, now_s=now_s)
        cadence = Cadence(policies, home, rank=ranks.rank, now_s=now_s)
        done, has_state = DoneMarker(tiers.home_store, rank=ranks.rank), state is not None
        return cls(options, tiers, ranks, pipeline, cadence, metrics, done, Pulse(), watching, has_state)

    def show(self, text: str) -> None:
        """Log a line for the user on rank 0, unless the option `quiet` is set."""
        if self.ranks.rank == 0 and not self.options.quiet:
            _log.info(text)


class DoneMarker:
    """Durable record that the run has finished; an exit status alone may be lost. Only rank 0 uses it."""

    def __init__(self, home: Store, *, rank: int) -> None:
        self._home, self._is_first = home, rank == 0
        self.step: int | None = None  # final step of the run, as the marker was read; None without one

    def read(self) -> None:
        """Read the marker. One that cannot be read counts as missing: `write` replaces it."""
        self.step = None
        if self._is_first:
            with contextlib.suppress(HoldfastError):  # it only selects a line of text
                self.step = runs.parse(runs.Done, self._home.get(names.DONE), names.DONE).step

    def write(self, run: str, attempt: int, step: int) -> None:
        """Mark the run as finished at `step`."""
        if self._is_first and self.step != step:
            done = runs.Done(run, attempt, step, finished_unix_s=time.time())
            self._home.put(names.DONE, runs.document(done))

    def delete(self) -> None:
        """Delete the marker, if it was read: the run is trained further."""
        if self.step is not None:
            self._home.delete(names.DONE)
            self.step = None
