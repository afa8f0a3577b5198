"""Topologies of the tiers: home only, a local tier that all ranks share, and node-local folders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from typing_extensions import override

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.retain import ShareRetention
from holdfast.checkpoint.keeper.commit_tier import Committed, CommitTier, PendingSave
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.home_tier import HomeTier
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.messages import DropSave, MarkComplete
from holdfast.checkpoint.keeper.reports import Reports
from holdfast.checkpoint.keeper.retention_thread import RetentionThread, delete_old
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store import Store
from holdfast.errors import RetryLater

_PERSISTED_BY_ALL = "every rank has reported that its files are durable"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Parts of a keeper that its topology uses.

    Attributes:
        watches: halves of the watches.
        store: store of the tier that saves are committed in first.
        home: store of home, if that is another tier.
        in_work: returns the saves that the worker has not finished.
    """

    config: KeeperConfig
    inbox: TrainerInbox
    reports: Reports
    watches: KeeperWatches
    store: Store
    home: Store | None
    in_work: Callable[[], set[CheckpointId]]


class Topology(ABC):
    """Arrangement of tiers: decides when a save is complete, where it is sent, and what is deleted."""

    @abstractmethod
    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        """Commit a save if it is complete.

        Args:
            save: save whose files of this rank are durable.
            limit_s: time since its arrival after which it is given up.

        Returns:
            None while parts of other ranks are missing; an error if they will never arrive.
        """

    @abstractmethod
    def finish(self, save: PendingSave, committed: Committed, seconds: float) -> None:
        """Report a committed save, drain it if due, and delete older ones."""

    def drop(self, drop: DropSave) -> None:
        """Refuse a save that this rank has no copy of."""
        return  # no other rank waits for it

    def drain(self, checkpoint: CheckpointId) -> None:
        """Send a checkpoint home, once it is complete."""
        return  # every save is in home

    def set_best(self, steps: Iterable[int], *, is_due: bool) -> None:
        """Keep this attempt's best saves until they are in home. If due, send them once they are complete."""
        return  # every save is in home

    @abstractmethod
    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step in each tier that has a newer one."""

    @abstractmethod
    def note_metrics(self, step: int, metrics: Mapping[str, float], *, is_late: bool) -> None:
        """Record the metrics of a save. `is_late` if they have changed since it was persisted."""

    def mark_complete(self, checkpoint: CheckpointId) -> None:
        """Record that a checkpoint is complete, as all ranks or home have confirmed."""
        return  # manifests show what is complete

    @property
    @abstractmethod
    def has_delayed(self) -> bool:
        """True if a failing store has delayed something."""

    @abstractmethod
    def retry_delayed(self) -> None:
        """Repeat what a failing store has delayed."""

    @abstractmethod
    def join_retention(self) -> None:
        """Wait until everything superfluous is deleted."""

    def close(self, *, with_newest: bool) -> None:
        """Complete everything that is due in home.

        Args:
            with_newest: also send the newest checkpoint home, as there may be no later attempt.

        Blocks: until home has everything, or has failed for too long.
        """
        return  # every save is in home


def make_topology(surroundings: Surroundings) -> Topology:
    """Return the topology of a keeper's configuration."""
    if surroundings.home is None:
        return HomeOnly(surroundings)
    if surroundings.config.is_node_local:
        return NodeLocal(surroundings, surroundings.home)
    return SharedLocal(surroundings, surroundings.home)


class HomeOnly(Topology):
    """Topology without a local tier: saves are committed in home."""

    def __init__(self, surroundings: Surroundings) -> None:
        config = surroundings.config
        self._reports = surroundings.reports
        self._tier = CommitTier(
            surroundings.store,
            config,
            config.keep,
            inbox=surroundings.inbox,
            reports=surroundings.reports,
            watches=surroundings.watches,
            in_work=surroundings.in_work,
        )

    @override
    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        return self._tier.try_commit(save, limit_s)

    @override
    def finish(self, save: PendingSave, committed: Committed, seconds: float) -> None:
        self._reports.committed(save.step, num_bytes=save.num_bytes, seconds=seconds)
        self._tier.add_committed(save.step, committed.ancestors)

    @override
    def drop(self, drop: DropSave) -> None:
        self._tier.drop(drop)

    @override
    def delete(self, step: int) -> None:
        self._tier.delete(step)

    @override
    def note_metrics(self, step: int, metrics: Mapping[str, float], *, is_late: bool) -> None:
        self._tier.note_metrics(step, metrics, is_late=is_late)

    @property
    @override
    def has_delayed(self) -> bool:
        return self._tier.has_delayed

    @override
    def retry_delayed(self) -> None:
        self._tier.retry_delayed()

    @override
    def join_retention(self) -> None:
        self._tier.join_retention()


class LocalTopology(Topology):
    """Topology with a local tier. Saves are drained from it to home."""

    _home: HomeTier
    _attempt: int

    @override
    def drain(self, checkpoint: CheckpointId) -> None:
        self._home.request(checkpoint)

    @override
    def set_best(self, steps: Iterable[int], *, is_due: bool) -> None:
        self._home.set_best({self._checkpoint(step) for step in steps}, is_due=is_due)

    @override
    def note_metrics(self, step: int, metrics: Mapping[str, float], *, is_late: bool) -> None:
        if is_late:  # otherwise they are drained with the save
            self._home.set_metrics(self._checkpoint(step), metrics)

    def _checkpoint(self, step: int) -> CheckpointId:
        """Return the checkpoint of a step of this attempt."""
        return CheckpointId(attempt=self._attempt, step=step)


class SharedLocal(LocalTopology):
    """Topology with a local tier for all ranks: saves are committed there, and drained to home."""

    def __init__(self, surroundings: Surroundings, home: Store) -> None:
        config, in_work = surroundings.config, surroundings.in_work
        self._store, self._reports, self._attempt = surroundings.store, surroundings.reports, config.attempt
        self._home = HomeTier(
            surroundings.store,
            home,
            config,
            reports=surroundings.reports,
            watches=surroundings.watches,
            is_complete=self._is_committed,
            on_arrived=lambda _: self._tier.retain_again(),  # it was kept until now
        )
        self._tier = CommitTier(
            surroundings.store,
            config,
            Keep(config.keep_local),
            inbox=surroundings.inbox,
            reports=surroundings.reports,
            watches=surroundings.watches,
            in_work=lambda: in_work() | self._home.needed,
        )

    @override
    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        return self._tier.try_commit(save, limit_s)

    @override
    def finish(self, save: PendingSave, committed: Committed, seconds: float) -> None:
        self._reports.committed(save.step, num_bytes=save.num_bytes, seconds=seconds)
        self._home.add_committed(self._checkpoint(save.step), is_due=save.to_home)
        self._tier.add_committed(save.step, committed.ancestors)

    @override
    def drop(self, drop: DropSave) -> None:
        self._tier.drop(drop)

    @override
    def delete(self, step: int) -> None:
        self._home.delete(step)
        self._tier.delete(step)

    def _is_committed(self, checkpoint: CheckpointId) -> bool:
        return self._store.size(names.manifest(checkpoint.step, checkpoint.attempt)) is not None

    @property
    @override
    def has_delayed(self) -> bool:
        return self._tier.has_delayed or self._home.has_delayed

    @override
    def retry_delayed(self) -> None:
        self._tier.retry_delayed()
        self._home.retry_delayed()

    @override
    def join_retention(self) -> None:
        self._tier.join_retention()

    @override
    def close(self, *, with_newest: bool) -> None:
        newest = self._tier.newest_step if with_newest else None
        self._home.close(None if newest is None else self._checkpoint(newest))
        self._tier.join_retention()


class NodeLocal(LocalTopology):
    """Topology with a local folder per host for its own ranks. Manifests exist only in home."""

    def __init__(self, surroundings: Surroundings, home: Store) -> None:
        self._config, self._store = surroundings.config, surroundings.store
        self._attempt = self._config.attempt
        self._inbox, self._reports = surroundings.inbox, surroundings.reports
        self._in_work = surroundings.in_work
        self._newest_step: int | None = None  # newest one that this rank has persisted
        self._complete: CheckpointId | None = None  # newest checkpoint that is known to be complete
        self._in_home: CheckpointId | None = None  # newest checkpoint that this keeper has drained
        self._home = HomeTier(
            surroundings.store,
            home,
            self._config,
            reports=surroundings.reports,
            watches=surroundings.watches,
            is_complete=self._may_be_complete,
            on_arrived=self._on_arrived,
        )
        keep, is_own = Keep(self._config.keep_local), self._config.is_responsible_for
        self._retention = ShareRetention(surroundings.store, keep, is_own)
        self._retention_thread = RetentionThread(self._retain)

    @override
    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        return Committed(())  # no rank sees all parts: the manifest is written in home

    @override
    def finish(self, save: PendingSave, committed: Committed, seconds: float) -> None:
        self._reports.durable(save.step)
        self._newest_step = max(save.step, self._newest_step or 0)
        self._home.add_committed(self._checkpoint(save.step), is_due=save.to_home)

    @override
    def delete(self, step: int) -> None:
        self._home.delete(step)
        self._retention.add_unwanted(step)
        if self._complete is not None:
            self._retention_thread.request()

    def _may_be_complete(self, checkpoint: CheckpointId) -> bool:
        """Return True if a checkpoint is complete as far as this folder shows."""
        if checkpoint.attempt != self._attempt:
            return True
        own = names.part(checkpoint.step, checkpoint.attempt, self._config.rank)
        return self._store.size(own) is not None

    def _on_arrived(self, checkpoint: CheckpointId) -> None:
        self._in_home = max(checkpoint, self._in_home or checkpoint)
        self._inbox.put(MarkComplete(attempt=checkpoint.attempt, step=checkpoint.step))

    @override
    def mark_complete(self, checkpoint: CheckpointId) -> None:
        if self._complete is not None and checkpoint <= self._complete:
            return
        self._complete = checkpoint
        is_own = checkpoint.attempt == self._attempt
        if self._config.rank == 0 and is_own and checkpoint != self._in_home:
            tier = self._reports.tier
            self._reports.history.record(
                "committed", step=checkpoint.step, tier=tier, detail=_PERSISTED_BY_ALL
            )
        self._retention_thread.request()

    def _retain(self) -> None:
        assert self._complete is not None
        complete, needed = self._complete, self._in_work() | self._home.needed
        if self._in_home is not None:
            needed.add(self._in_home)
        with self._reports.retention_errors(complete.step, self._reports.tier):
            old = self._retention.apply(complete, needed)
            delete_old(self._store, old, self._reports, self._reports.tier)

    @property
    @override
    def has_delayed(self) -> bool:
        return self._home.has_delayed

    @override
    def retry_delayed(self) -> None:
        self._home.retry_delayed()

    @override
    def join_retention(self) -> None:
        self._retention_thread.join()

    @override
    def close(self, *, with_newest: bool) -> None:
        newest = self._newest_step if with_newest else None
        self._home.close(None if newest is None else self._checkpoint(newest))
