"""Home behind a local tier: checkpoints are drained to it, and old ones are deleted there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.drain import Drain, Drained
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS, Reports
from holdfast.checkpoint.keeper.retention_thread import TierRetention
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict


class HomeTier:
    """Drain of a keeper, and retention in home.

    Args:
        is_complete: returns True if a checkpoint is complete in the local tier.
        on_arrived: called in the drain's thread with each checkpoint that is complete in home.
    """

    def __init__(
        self,
        local: Store,
        home: Store,
        config: KeeperConfig,
        *,
        reports: Reports,
        watches: KeeperWatches,
        is_complete: Callable[[CheckpointId], bool],
        on_arrived: Callable[[CheckpointId], None] = lambda _: None,
    ) -> None:
        self._config, self._reports = config, reports
        self._is_complete, self._on_arrived = is_complete, on_arrived
        self._retention = Retention(home, config.keep, healthy_back=config.healthy_back)
        # Other ranks may have copied their files of a checkpoint that this rank has yet to copy.
        self._deletion = TierRetention(
            home,
            "home",
            reports,
            lambda newest, ancestors: self._retention.apply(newest, ancestors, self.needed),
        )
        self._is_failing = False
        self._best: set[CheckpointId] = set()  # they stay in the local tier until they are in home
        self._due_best: set[CheckpointId] = set()  # those that are sent home although they are not due
        self._wanted: set[CheckpointId] = set()  # to be drained as soon as they are committed
        self._drain = Drain(local, home, config, self._on_drained, watches)

    @property
    def needed(self) -> set[CheckpointId]:
        """Checkpoints on their way home, and the best, which no tier must delete yet."""
        return self._drain.needed() | self._wanted | self._drain.not_in_home(self._best)

    def request(self, checkpoint: CheckpointId) -> None:
        """Drain a checkpoint, now or once it is complete."""
        if self._is_complete(checkpoint):
            self._drain.submit(checkpoint)
        else:
            self._wanted.add(checkpoint)

    def add_committed(self, checkpoint: CheckpointId, *, is_due: bool) -> None:
        """Drain a new checkpoint if it is due in home, or was requested."""
        if checkpoint in self._wanted:
            self._wanted.discard(checkpoint)
            self._drain.submit(checkpoint)
        elif is_due:
            self._drain.submit_due(checkpoint)
        elif checkpoint in self._due_best:
            self._drain_best()

    def set_best(self, best: set[CheckpointId], *, is_due: bool) -> None:
        """Keep the best checkpoints in the local tier until they are in home. Replaces the previous set.

        If due, they are drained once they are complete, instead of those that were to be drained.
        """
        self._best = best
        if is_due:
            self._due_best = best
            self._drain_best()

    def _drain_best(self) -> None:
        with contextlib.suppress(*TRANSIENT_ERRORS):  # the next change of the set sends them
            self._drain.set_best(
                {checkpoint for checkpoint in self._due_best if self._is_complete(checkpoint)}
            )

    def set_metrics(self, checkpoint: CheckpointId, metrics: Mapping[str, float]) -> None:
        """Copy the changed metrics of a checkpoint, if it is in home."""
        self._retention.note_metrics(checkpoint, metrics)
        self._drain.update_metrics(checkpoint)

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step, after the next drain or at the end."""
        self._retention.unwanted.add(step)

    def close(self, newest: CheckpointId | None = None) -> None:
        """Complete all drains, also of `newest` and the best ones, if it is given, though they are not due.

        Blocks: until home has everything, or has failed for too long.
        """
        if newest is not None:
            self._drain.submit(newest)
            self.set_best(self._best, is_due=True)
        self._drain.close()
        if self._config.rank == 0 and self._deletion.newest is not None and self._retention.is_due:
            self._deletion.run()  # for steps that were to be deleted after the last drain

    def _on_drained(self, drained: Drained) -> None:
        """Report the outcome of a drain. Runs in the drain's thread."""
        error = drained.error
        if error is None:
            self._is_failing = False
            self._on_arrived(
                drained.checkpoint_id
            )  # first: after the report the trainer may end this process
            self._reports.arrived_home(
                drained.checkpoint_id, num_bytes=drained.num_bytes, seconds=drained.seconds
            )
            self._deletion.add(drained.checkpoint_id, drained.ancestors)  # one of the best may be older
            if self._config.rank == 0 and self._retention.is_due:
                self._deletion.run(drained.step)
        elif isinstance(error, Conflict):
            self._reports.failed(drained.step, error)
        elif drained.is_over:
            self._is_failing = False
            self._reports.failed(drained.step, error, in_home=True)
        elif not self._is_failing:  # only the first of many tries
            self._is_failing = True
            self._reports.drain_delayed(drained.step, error)
