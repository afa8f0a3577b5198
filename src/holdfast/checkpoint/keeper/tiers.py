"""Tiers that a keeper writes to: home, alone or behind local folders that ranks share or each host has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.retain import Deleted, ShareRetention
from holdfast.checkpoint.keeper.commit_tier import Committed, CommitTier, PendingSave
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.home_tier import HomeTier
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.messages import DropSave, MarkComplete
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS, Reports
from holdfast.checkpoint.keeper.retention_thread import TierRetention
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store import Store
from holdfast.errors import RetryLater

_PERSISTED_BY_ALL = "every rank has reported that its files are durable"


class KeeperTiers:
    """Tiers of a keeper. They decide when a save is complete, where it is sent, and what is deleted.

    A save is committed in the nearest tier that receives the files of all ranks. With node-local folders that
    is home, and a save is only durable here. Both kinds of local folders are drained to home alike.

    Args:
        store: the nearest tier.
        home: home, if that is another tier.
        in_work: returns the saves that the worker has not finished.
    """

    def __init__(
        self,
        config: KeeperConfig,
        *,
        inbox: TrainerInbox,
        reports: Reports,
        watches: KeeperWatches,
        store: Store,
        home: Store | None,
        in_work: Callable[[], set[CheckpointId]],
    ) -> None:
        self._config, self._store, self._reports, self._inbox = config, store, reports, inbox
        self._in_work = in_work
        self._newest_step: int | None = None  # newest one that this rank has persisted
        self._delayed: list[Callable[[], None]] = []
        self._home: HomeTier | None = None
        self._commit: CommitTier | None = None
        # With node-local folders, where retention cannot see what is complete:
        self._share: ShareRetention | None = None
        self._in_home: CheckpointId | None = None  # newest checkpoint that this keeper has drained
        if home is not None:
            self._home = HomeTier(
                store,
                home,
                config,
                reports=reports,
                watches=watches,
                is_complete=self._is_complete,
                on_arrived=self._on_arrived,
            )
        if home is not None and config.is_node_local:
            self._share = ShareRetention(store, Keep(config.keep_local), config.is_responsible_for)
            self._share_deletion = TierRetention(store, reports.tier, reports, self._delete_of_share)
        else:
            keep = config.keep if home is None else Keep(config.keep_local)
            self._commit = CommitTier(
                store, config, keep, inbox=inbox, reports=reports, watches=watches, in_work=self._needed
            )

    def _needed(self) -> set[CheckpointId]:
        """Return the checkpoints that must stay in the nearest tier."""
        return self._in_work() | (set() if self._home is None else self._home.needed)

    def _checkpoint(self, step: int) -> CheckpointId:
        """Return the checkpoint of a step of this attempt."""
        return CheckpointId(attempt=self._config.attempt, step=step)

    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        """Commit a save if it is complete, see `CommitTier.try_commit`."""
        if self._commit is None:
            return Committed(())  # no rank sees all parts: the manifest is written in home
        return self._commit.try_commit(save, limit_s)

    def finish(self, save: PendingSave, committed: Committed, seconds: float) -> None:
        """Report a committed save, drain it if due, and delete older ones."""
        if self._commit is None:
            self._reports.durable(save.step)
            self._newest_step = max(save.step, self._newest_step or 0)
        else:
            self._reports.committed(save.step, num_bytes=save.num_bytes, seconds=seconds)
        if self._home is not None:
            self._home.add_committed(self._checkpoint(save.step), is_due=save.to_home)
        if self._commit is not None:
            self._commit.add_committed(save.step, committed.ancestors)

    def drop(self, drop: DropSave) -> None:
        """Refuse a save that this rank has no copy of."""
        if self._commit is not None:  # with node-local folders no other rank waits for it
            self._now_or_later(partial(self._commit.drop, drop))

    def drain(self, checkpoint: CheckpointId) -> None:
        """Send a checkpoint home, once it is complete."""
        if self._home is not None:
            self._now_or_later(partial(self._home.request, checkpoint))

    def set_best(self, steps: Iterable[int], *, is_due: bool) -> None:
        """Keep this attempt's best saves until they are in home. If due, send them once they are complete."""
        if self._home is not None:
            self._home.set_best({self._checkpoint(step) for step in steps}, is_due=is_due)

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step in each tier that has a newer one."""
        for tier in (self._home, self._commit):
            if tier is not None:
                tier.delete(step)
        if self._share is not None:
            self._share.unwanted.add(step)
            self._share_deletion.request()

    def note_metrics(self, step: int, metrics: Mapping[str, float], *, is_late: bool) -> None:
        """Record the metrics of a save. `is_late` if they have changed since it was persisted."""
        if self._home is None:
            assert self._commit is not None
            self._commit.note_metrics(step, metrics, is_late=is_late)
        elif is_late:  # otherwise they are drained with the save
            self._home.set_metrics(self._checkpoint(step), metrics)

    def mark_complete(self, checkpoint: CheckpointId) -> None:
        """Record that a checkpoint is complete, as all ranks or home have confirmed."""
        if self._share is None or not self._share_deletion.add(checkpoint):
            return  # elsewhere manifests show it
        is_own = checkpoint.attempt == self._config.attempt
        if self._config.rank == 0 and is_own and checkpoint != self._in_home:
            self._reports.history.record(
                "committed", step=checkpoint.step, tier=self._reports.tier, detail=_PERSISTED_BY_ALL
            )
        self._share_deletion.request()

    def _delete_of_share(self, complete: CheckpointId, _: Ancestors) -> Iterable[Deleted]:
        """Delete what a node-local folder need not keep, now that a checkpoint is complete."""
        assert self._share is not None
        in_home = set() if self._in_home is None else {self._in_home}
        return self._share.apply(complete, self._needed() | in_home)

    @property
    def has_delayed(self) -> bool:
        """True if a failing store has delayed something."""
        return bool(self._delayed)

    def retry_delayed(self) -> None:
        """Repeat what a failing store has delayed."""
        delayed, self._delayed = self._delayed, []
        for act in delayed:
            self._now_or_later(act)

    def _now_or_later(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TRANSIENT_ERRORS:
            self._delayed.append(act)

    def join_retention(self) -> None:
        """Wait until everything superfluous is deleted."""
        if self._commit is not None:
            self._commit.join_retention()
        else:
            self._share_deletion.join()

    def close(self, *, with_newest: bool) -> None:
        """Complete everything that is due in home, and send the newest checkpoint too, if it may be the last.

        Blocks: until home has everything, or has failed for too long.
        """
        if self._home is None:
            return
        newest = self._newest_step if self._commit is None else self._commit.newest_step
        self._home.close(self._checkpoint(newest) if with_newest and newest is not None else None)
        if self._commit is not None:
            self._commit.join_retention()

    def _is_complete(self, checkpoint: CheckpointId) -> bool:
        """Return True if a checkpoint is complete, as far as the nearest tier shows."""
        step, attempt = checkpoint.step, checkpoint.attempt
        if self._commit is not None:
            return self._store.size(names.manifest(step, attempt)) is not None
        own = names.part(step, attempt, self._config.rank)
        return attempt != self._config.attempt or self._store.size(own) is not None

    def _on_arrived(self, checkpoint: CheckpointId) -> None:
        """Release a checkpoint that was kept until it was in home. Runs in the drain's thread."""
        if self._commit is not None:
            self._commit.retain_again()
        elif self._share is not None:
            self._in_home = max(checkpoint, self._in_home or checkpoint)
            self._inbox.put(MarkComplete(attempt=checkpoint.attempt, step=checkpoint.step))
