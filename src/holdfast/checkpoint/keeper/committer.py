"""Committer of a keeper: commits complete saves in the tier with all ranks' files, gives up hopeless ones."""

from __future__ import annotations

import time
from collections.abc import Iterator

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.commit import (
    check_not_refused,
    commit,
    is_committed,
    read_committed,
    was_retired,
)
from holdfast.checkpoint.home.listing import WriterId, missing_ranks
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive, running_keepers
from holdfast.checkpoint.store import Store
from holdfast.errors import RetryLater
from holdfast.system.log import QUIET_S


class PendingSave(Struct):
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


class Committed(Struct, frozen=True):
    """Outcome of a commit. `ancestors` is None if retention has deleted the checkpoint since."""

    ancestors: Ancestors | None


class Committer:
    """Committer of the saves of one rank. Rank 0 writes the manifests."""

    def __init__(self, components: KeeperComponents) -> None:
        self._config, self._store = components.config, components.store
        self._inbox, self._reports = components.inbox, components.reports
        self._watches = components.watches

    def try_commit(self, save: PendingSave, limit_s: float) -> Committed | RetryLater | None:
        """Commit a save if all ranks' parts exist, or detect that another rank has.

        Return None if parts are missing; an error if they will never arrive, or not within `limit_s`.
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
            made = commit(store, writer, step, claim=self._config.claim, judges=self._watches.judges)
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
                self._inbox.report_delay(save.step, self._why_waiting(missing))
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
        alive = {info.rank for info in self._keepers() if not info.busy and is_trainer_alive(info)}
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
        has_committer = self._config.rank == 0 or any(
            info.rank == 0 and not info.is_done for info in self._keepers()
        )
        # List again: parts or commit may have arrived between the listing and the check of the keepers.
        may_commit = has_committer and not missing_ranks(self._store, self._config.writer, step)
        return not may_commit and not is_committed(self._store, self._config.writer, step)

    def _others_work(self) -> bool:
        """Return True if other ranks of this attempt may still write files."""
        others = (info for info in self._keepers() if info.rank != self._config.rank)
        return any(info.busy or is_trainer_alive(info) for info in others)

    def _keepers(self) -> Iterator[KeeperInfo]:
        """Yield the running keepers of this attempt on this host."""
        found = (info for _, info in running_keepers(self._config.home))
        return (info for info in found if info.attempt == self._config.attempt)


def was_committed(store: Store, writer: WriterId, step: int) -> bool:
    """Return True if an earlier keeper has committed a save. Retention may have deleted it since."""
    missing = missing_ranks(store, writer, step)
    return is_committed(store, writer, step) or (writer.rank in missing and was_retired(store, writer, step))
