"""Tiers that a keeper writes to: home, alone or behind local folders that ranks share or each host has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.commit import refuse
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.home.retain import Retention, ShareRetention
from holdfast.checkpoint.keeper.committer import Committed, Committer, PendingSave
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.drain import Drain
from holdfast.checkpoint.keeper.messages import DropSave, MarkComplete
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS
from holdfast.checkpoint.keeper.retention_thread import TierRetention
from holdfast.checkpoint.retention import Keep
from holdfast.errors import InvalidInput, RetryLater

_PERSISTED_BY_ALL = "every rank has reported that its files are durable"


class KeeperTiers:
    """Tiers of a keeper. They decide when a save is complete, where it is sent, and what is deleted.

    A save is committed in the nearest tier that receives the files of all ranks. With node-local folders that
    is home, and a save is only durable here. Both kinds of local folders are drained to home alike.

    Args:
        in_work: returns the saves that the worker has not finished.
    """

    def __init__(self, components: KeeperComponents, in_work: Callable[[], set[CheckpointId]]) -> None:
        config, store, self._reports = components.config, components.store, components.reports
        self._config, self._store, self._inbox = config, store, components.inbox
        self._in_work = in_work
        self._newest: CheckpointId | None = None  # newest that was finished here, and not deleted before that
        self._in_home: CheckpointId | None = None  # newest that this keeper has drained
        self.delayed: list[Callable[[], None]] = []  # by a failing store
        self._drain: Drain | None = None
        if components.home is not None:
            self._drain = Drain(components, components.home, self._is_complete, self._on_arrived)
        # With node-local folders no rank sees all parts, and retention cannot see what is complete.
        self._committer = None if config.is_node_local else Committer(components)
        keep = config.keep if components.home is None else Keep(config.keep_local)
        self._retention = (
            Retention(store, keep, refuse=self._refuse_incomplete, healthy_back=config.healthy_back)
            if self._committer is not None
            else ShareRetention(store, keep, config.is_responsible_for)
        )
        # Only rank 0 commits, and only rank 0 deletes; in a node-local folder each rank its own files.
        deletes = config.rank == 0 or config.is_node_local
        self._deletion = TierRetention(
            self._retention, self._reports.tier, self._reports, self._needed, deletes=deletes
        )

    def _needed(self) -> set[CheckpointId]:
        """Return the checkpoints that must stay in the nearest tier."""
        needed = self._in_work() | (set() if self._drain is None else self._drain.needed)
        # Without a manifest here, the newest in home stays until retention knows that it is complete.
        return needed | ({self._in_home} if self._in_home and self._committer is None else set())

    def _checkpoint(self, step: int) -> CheckpointId:
        """Return the checkpoint of a step of this attempt."""
        return CheckpointId(attempt=self._config.attempt, step=step)

    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        """Commit a save if it is complete, see `Committer.try_commit`."""
        if self._committer is None:
            return Committed(())  # the manifest is written in home
        return self._committer.try_commit(save, limit_s)

    def finish(self, save: PendingSave, committed: Committed, seconds: float) -> None:
        """Report a committed save, drain it if due, and delete older ones."""
        checkpoint = self._checkpoint(save.step)
        if committed.ancestors is not None:
            self._newest = max(checkpoint, self._newest or checkpoint)
        if self._committer is None:
            self._reports.reached(save.step, "durable")
        else:
            self._reports.reached(save.step, "durable", num_bytes=save.num_bytes, seconds=seconds)
        if self._drain is not None:
            self._drain.add_committed(checkpoint, is_due=save.to_home)
        if self._committer is not None:  # else `mark_complete` follows
            if committed.ancestors is not None:
                self._deletion.add(checkpoint, committed.ancestors)
            # Retention judges from its newest checkpoint: this save may be older than one that is complete.
            self._deletion.request()

    def drop(self, drop: DropSave) -> None:
        """Refuse a save that this rank has no copy of. Otherwise other ranks would wait for its part."""
        if self._committer is not None:  # with node-local folders no other rank waits for it
            reason = f"Rank {self._config.rank} has no copy of it: {drop.reason}"
            error = InvalidInput(reason, step=drop.step, rank=self._config.rank)
            self._now_or_later(partial(refuse, self._store, self._config.writer, drop.step, error))

    def _refuse_incomplete(self, step: int) -> None:
        """Refuse a save that retention is about to delete, since it was never committed."""
        newest = self._deletion.newest
        assert newest is not None  # retention runs as of it
        reason = (
            f"Step {step} was not complete when step {newest.step} was committed, so its files were deleted. "
            "See the messages of the other ranks."
        )
        refuse(self._store, self._config.writer, step, InvalidInput(reason, step=step))

    def drain(self, checkpoint: CheckpointId) -> None:
        """Send a checkpoint home, once it is complete."""
        if self._drain is not None:
            self._now_or_later(partial(self._drain.request, checkpoint))

    def set_best(self, steps: Iterable[int], *, is_due: bool) -> None:
        """Keep this attempt's best saves until they are in home. If due, send them once they are complete."""
        if self._drain is not None:
            self._drain.set_best({self._checkpoint(step) for step in steps}, is_due=is_due)

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step in each tier that has a newer one."""
        if self._drain is not None:
            self._drain.delete(step)
        self._deletion.delete(step)

    def note_metrics(self, step: int, metrics: SaveValues, *, is_late: bool) -> None:
        """Record the metrics of a save. `is_late` if they have changed since it was persisted."""
        if self._drain is None:
            self._retention.note_metrics(self._checkpoint(step), metrics.values)
            if is_late and self._config.keep.best is not None:  # another save may be the best now
                self._deletion.request()
        elif is_late:  # otherwise they are drained with the save
            self._drain.update_metrics(self._checkpoint(step), metrics)

    def mark_complete(self, checkpoint: CheckpointId) -> None:
        """Record that a checkpoint is complete, as all ranks or home have confirmed."""
        if self._committer is not None or not self._deletion.add(checkpoint):
            return  # elsewhere manifests show it
        is_own = checkpoint.attempt == self._config.attempt
        if self._config.rank == 0 and is_own and checkpoint != self._in_home:
            self._reports.history.record(
                "committed", step=checkpoint.step, tier=self._reports.tier, detail=_PERSISTED_BY_ALL
            )
        self._deletion.request()

    def retry_delayed(self) -> None:
        """Repeat what a failing store has delayed."""
        delayed, self.delayed = self.delayed, []
        for act in delayed:
            self._now_or_later(act)

    def _now_or_later(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TRANSIENT_ERRORS:
            self.delayed.append(act)

    def join_retention(self) -> None:
        """Wait until everything superfluous is deleted."""
        self._deletion.join()

    def close(self, *, with_newest: bool) -> None:
        """Complete everything that is due in home, and send the newest checkpoint too, if it may be the last.

        Blocks: until home has everything, or has failed for too long.
        """
        if self._drain is not None:
            self._drain.close(self._newest if with_newest else None)
            self._deletion.join()

    def _is_complete(self, checkpoint: CheckpointId) -> bool:
        """Return True if a checkpoint is complete, as far as the nearest tier shows."""
        step, attempt = checkpoint.step, checkpoint.attempt
        if self._committer is not None:
            return self._store.size(names.manifest(step, attempt)) is not None
        own = names.part(step, attempt, self._config.rank)
        return attempt != self._config.attempt or self._store.size(own) is not None

    def _on_arrived(self, checkpoint: CheckpointId) -> None:
        """Release a checkpoint that was kept until it was in home. Runs in the drain's thread."""
        self._in_home = max(checkpoint, self._in_home or checkpoint)
        if self._committer is not None:
            self._deletion.request()
        else:
            self._inbox.put(MarkComplete(attempt=checkpoint.attempt, step=checkpoint.step))
