"""Home behind a local tier: checkpoints are drained to it, and old ones are deleted there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.drain import Drain, Drained
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS, Reports
from holdfast.checkpoint.keeper.retention_thread import delete_old
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict


class HomeTier:
    """Drain of a keeper, and retention in home.

    Args:
        is_complete: returns True if a checkpoint is complete in the local tier.
        on_arrived: called with each checkpoint that is complete in home, in the drain's thread.
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
        self._store, self._config, self._reports = home, config, reports
        self._is_complete, self._on_arrived = is_complete, on_arrived
        self._retention = Retention(home, config.keep, healthy_back=config.healthy_back)
        self._newest: Drained | None = None
        self._is_failing = False
        self._best: set[CheckpointId] = set()  # they stay in the local tier until they are in home
        self._due_best: set[CheckpointId] = set()  # those that are sent home although they are not due
        self._wanted: set[CheckpointId] = set()  # to be drained as soon as they are committed
        self._unchecked: list[CheckpointId] = []  # requested while the local tier could not be read
        self._drain = Drain(local, home, config, self._on_drained, watches)

    @property
    def needed(self) -> set[CheckpointId]:
        """Checkpoints on their way home, and the best, which no tier must delete yet."""
        return self._drain.needed() | self._wanted | self._drain.not_in_home(self._best)

    @property
    def has_delayed(self) -> bool:
        """True if the local tier could not be read when a checkpoint was requested."""
        return bool(self._unchecked)

    def request(self, checkpoint: CheckpointId) -> None:
        """Drain a checkpoint, now or once it is complete."""
        try:
            is_ready = self._is_complete(checkpoint)
        except TRANSIENT_ERRORS:
            self._unchecked.append(checkpoint)
            return
        if is_ready:
            self._drain.submit(checkpoint)
        else:
            self._wanted.add(checkpoint)

    def retry_delayed(self) -> None:
        """Repeat the requests that failed because the local tier could not be read."""
        unchecked, self._unchecked = self._unchecked, []
        for checkpoint in unchecked:
            self.request(checkpoint)

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

        Args:
            best: the checkpoints.
            is_due: drain them, once they are complete. They replace those that were to be drained.
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
        self._retention.add_unwanted(step)

    def close(self, newest: CheckpointId | None = None) -> None:
        """Complete all drains.

        Args:
            newest: checkpoint to drain although it is not due, as well as the best ones; None for neither.

        Blocks: until home has everything, or has failed for too long.
        """
        if newest is not None:
            self._drain.submit(newest)
            self.set_best(self._best, is_due=True)
        self._drain.close()
        if self._config.rank == 0 and self._newest is not None and self._retention.is_due:
            self._retain(self._newest.step)  # for steps that were to be deleted after the last drain

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
            self._note_newest(drained)
            if self._config.rank == 0 and self._retention.is_due:
                self._retain(drained.step)
        elif isinstance(error, Conflict):
            self._reports.failed(drained.step, error)
        elif drained.is_over:
            self._is_failing = False
            self._reports.failed(drained.step, error, in_home=True)
        elif not self._is_failing:  # only the first of many tries
            self._is_failing = True
            self._reports.drain_delayed(drained.step, error)

    def _note_newest(self, drained: Drained) -> None:
        newest = self._newest  # one of the best may be drained after it
        if newest is None or drained.checkpoint_id > newest.checkpoint_id:
            self._newest = drained

    def _retain(self, step: int) -> None:
        newest = self._newest
        assert newest is not None
        with self._reports.retention_errors(step, "home"):
            # Other ranks may have copied their files of a checkpoint that this rank has yet to copy.
            old = self._retention.apply(newest.checkpoint_id, newest.ancestors, self.needed)
            delete_old(self._store, old, self._reports, "home")
