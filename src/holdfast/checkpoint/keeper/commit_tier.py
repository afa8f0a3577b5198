"""Tier that saves are committed in: commits complete saves, gives up hopeless ones, deletes old ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.commit import (
    check_not_refused,
    commit,
    is_committed,
    read_committed,
    refuse,
    was_retired,
)
from holdfast.checkpoint.home.listing import WriterId, missing_ranks
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.lockfile import is_trainer_alive, running_keepers
from holdfast.checkpoint.keeper.messages import DropSave
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS, Reports
from holdfast.checkpoint.keeper.retention_thread import RetentionThread, delete_old
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store import Store
from holdfast.errors import InvalidInput, RetryLater
from holdfast.system.log import QUIET_S


@dataclass(slots=True)
class PendingSave:
    """Save whose files of this rank are durable, and that is not committed yet."""

    step: int
    num_bytes: int = 0
    to_home: bool = True  # it is due in home
    received_s: float = 0.0
    next_look_s: float = 0.0
    reported: str = ""  # kind of the reason for which it waits, once reported

    def is_worth_a_line(self, kind: str) -> bool:
        """Return True once for each kind of reason, after a few seconds."""
        if kind == self.reported or time.monotonic() - self.received_s <= QUIET_S:
            return False
        self.reported = kind
        return True


@dataclass(frozen=True, slots=True)
class Committed:
    """Outcome of a commit. `ancestors` is None if retention has deleted the checkpoint since."""

    ancestors: Ancestors | None


class CommitTier:
    """Tier that receives the files of all ranks, and the manifests.

    Args:
        inbox: shows whether the trainer is alive.
        reports: receives deletions and errors of retention.
        watches: halves of the watches, which judge what is committed.
        in_work: returns checkpoints that retention must not delete yet.
    """

    def __init__(
        self,
        store: Store,
        config: KeeperConfig,
        keep: Keep,
        *,
        inbox: TrainerInbox,
        reports: Reports,
        watches: KeeperWatches,
        in_work: Callable[[], set[CheckpointId]],
    ) -> None:
        self._store, self._config, self._inbox, self._reports = store, config, inbox, reports
        self._in_work, self._watches = in_work, watches
        self._newest: tuple[int, Ancestors] | None = None  # newest step seen committed, not always the last
        self._retention = Retention(
            store, keep, refuse=self._refuse_incomplete, healthy_back=config.healthy_back
        )
        self._retention_thread = RetentionThread(self._retain)
        self._drops: list[DropSave] = []  # not written yet, as the store failed

    # -- commit ----------------------------------------------------------------------------------------------

    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        """Commit a save if all ranks' parts exist, or detect that another rank has.

        Returns:
            None if parts are missing; an error if they will never arrive.
        """
        store, writer, step = self._store, self._config.writer, save.step
        found = read_committed(store, writer, step)
        if found is not None:
            store.sync(names.step_dir(step))  # rank 0's keeper may not have reached its own sync
            return Committed(found.ancestors)
        missing = missing_ranks(store, writer, step)
        if missing or writer.rank != 0:
            check_not_refused(store, writer, step)
        if writer.rank in missing and was_retired(store, writer, step):
            return Committed(None)  # between two checks
        # Only rank 0 commits, and only rank 0 deletes. Otherwise a rank could make a checkpoint visible again
        # while another one deletes it.
        if writer.rank == 0 and not missing:
            made = commit(
                store,
                writer,
                step,
                claim=self._config.claim,
                judges=self._watches.judges,
            )
            self._watches.committed(step)
            if made.health.healthy is False:
                reasons = "; ".join(made.health.reasons)
                self._reports.history.record("unhealthy", step=step, detail=reasons, tier=self._reports.tier)
            return Committed(made.ancestors)
        return self._why_hopeless(save, missing, limit_s)

    def _why_hopeless(self, save: PendingSave, missing: list[int], limit_s: float) -> RetryLater | None:
        """Return why a save will never be committed; None while it may be."""
        waited_s = time.monotonic() - save.received_s
        is_alone = self._inbox.trainer_gone and self._config.all_ranks_here and not self._others_work()
        is_hopeless = is_alone and self._is_abandoned(save.step)
        if waited_s <= limit_s and not is_hopeless:
            if missing and save.is_worth_a_line("parts"):
                self._reports.delayed(save.step, self._why_waiting(missing))
            return None
        lacking = f"the parts of ranks {missing}" if missing else "rank 0's commit"
        return RetryLater(
            f"Step {save.step} was not committed: {lacking} did not arrive in {waited_s:.0f} s. The part of "
            f"rank {self._config.rank} is durable, and earlier checkpoints remain. See the messages of those "
            "ranks.",
            step=save.step,
        )

    def _why_waiting(self, missing: list[int]) -> str:
        """Return the ranks whose parts are missing, and the usual cause where they run."""
        attempt = self._config.attempt
        alive = {
            info.rank
            for _, info in running_keepers(self._config.home)
            if info.attempt == attempt and not info.busy and is_trainer_alive(info)
        }
        idle = [rank for rank in missing if rank in alive]
        hint = (
            f" Ranks {idle} run, and have not saved this step: every rank has to call save(), so remove "
            "conditions such as `if rank == 0:` around it."
            if idle
            else ""
        )
        return f"The parts of ranks {missing} are missing.{hint}"

    def _is_abandoned(self, step: int) -> bool:
        """Return True if no keeper of this attempt will commit a save. All trainers have exited.

        If only rank 0's keeper is missing, the next attempt commits it. It waits for this keeper first.
        """
        attempt = self._config.attempt
        has_committer = self._config.rank == 0 or any(
            info.attempt == attempt and info.rank == 0 and not info.is_done
            for _, info in running_keepers(self._config.home)
        )
        # List again: parts or commit may have arrived between the listing and the check of the keepers.
        if missing_ranks(self._store, self._config.writer, step):
            return not is_committed(self._store, self._config.writer, step)
        return not has_committer and not is_committed(self._store, self._config.writer, step)

    def _others_work(self) -> bool:
        """Return True if other ranks of this attempt may still write files."""
        return any(
            info.attempt == self._config.attempt
            and info.rank != self._config.rank
            and (info.busy or is_trainer_alive(info))
            for _, info in running_keepers(self._config.home)
        )

    # -- dropped saves ---------------------------------------------------------------------------------------

    @property
    def has_delayed(self) -> bool:
        """True if the store failed while a drop was written."""
        return bool(self._drops)

    def drop(self, drop: DropSave) -> None:
        """Refuse a save without a copy on this rank. Otherwise other ranks would wait for its part."""
        self._drops.append(drop)
        self.retry_delayed()

    def retry_delayed(self) -> None:
        """Write the drops that the store has failed to write."""
        drops, self._drops = self._drops, []
        rank = self._config.rank
        for drop in drops:
            reason = f"Rank {rank} has no copy of it: {drop.reason}"
            try:
                error = InvalidInput(reason, step=drop.step, rank=rank)
                refuse(self._store, self._config.writer, drop.step, error)
            except TRANSIENT_ERRORS:
                self._drops.append(drop)

    # -- retention -------------------------------------------------------------------------------------------

    def add_committed(self, step: int, ancestors: Ancestors | None) -> None:
        """Delete what a new checkpoint makes superfluous. Only rank 0 deletes."""
        if ancestors is not None and (self._newest is None or step > self._newest[0]):
            self._newest = step, ancestors
        # As of the newest: an older save may be committed after it, and seen from there it would not count.
        self.retain_again()

    def retain_again(self) -> None:
        """Delete what is superfluous, in the background. Threads may call this."""
        if self._config.rank == 0 and self._newest is not None and self._retention.is_due:
            self._retention_thread.request()

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step, once a newer one is complete."""
        self._retention.add_unwanted(step)
        self.retain_again()

    def note_metrics(self, step: int, metrics: Mapping[str, float], *, is_late: bool) -> None:
        """Record the metrics of a save for retention.

        Args:
            is_late: they have changed since the save was persisted, so that another one may be the best now.
        """
        self._retention.note_metrics(CheckpointId(attempt=self._config.attempt, step=step), metrics)
        if is_late and self._config.keep.best is not None and self._newest is not None:
            self._retention_thread.request()

    def _refuse_incomplete(self, step: int) -> None:
        """Refuse a save that retention is about to delete, since it was never committed."""
        reason = (
            f"Step {step} was not complete when step {self.newest_step} was committed, so its files were "
            "deleted. See the messages of the other ranks."
        )
        refuse(self._store, self._config.writer, step, InvalidInput(reason, step=step))

    @property
    def newest_step(self) -> int | None:
        """Newest step that this keeper saw committed, and that retention has not deleted."""
        return None if self._newest is None else self._newest[0]

    def join_retention(self) -> None:
        """Wait until everything superfluous is deleted."""
        self._retention_thread.join()

    def _retain(self) -> None:
        assert self._newest is not None
        step, ancestors = self._newest
        newest = CheckpointId(attempt=self._config.attempt, step=step)
        with self._reports.retention_errors(step, self._reports.tier):
            old = self._retention.apply(newest, ancestors, self._in_work())
            delete_old(self._store, old, self._reports, self._reports.tier)


def was_committed(store: Store, writer: WriterId, step: int) -> bool:
    """Return True if an earlier keeper has committed a save. Retention may have deleted it since."""
    missing = missing_ranks(store, writer, step)
    return is_committed(store, writer, step) or (writer.rank in missing and was_retired(store, writer, step))
