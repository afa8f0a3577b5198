"""Where a run's checkpoints are, nearest first: memory, a local folder, home; and which saves go home."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from holdfast.errors import Conflict, Denied, InvalidInput, Unsupported
from holdfast.format.run import Attempt
from holdfast.home.attempts import newest_number
from holdfast.home.claim import (
    check_no_writer,
    check_run,
    check_same_run,
    claim_attempt,
    claim_run,
    copy_claim,
)
from holdfast.home.listing import candidates, list_home
from holdfast.home.losses import check_no_losses, find_losses
from holdfast.home.recovery import recover_commit
from holdfast.home.skipped import Passed, drop_note, note_passed
from holdfast.home.writer import LiveTrainer
from holdfast.keeper import HeldStore, end_held
from holdfast.policy import Every, Keep, Pace, single_policies
from holdfast.quantity import read_bytes, read_seconds, say_bytes
from holdfast.restore.share import OTHER_RANKS
from holdfast.store import Store, open_store
from holdfast.store.apart import check_apart
from holdfast.store.nearest import Nearest
from holdfast.store.place import absolute_place
from holdfast.surroundings import rehearsed

Duration = str | float | datetime.timedelta
Id = tuple[int, int]  # (attempt, step), the order of checkpoints


class TierTerms(TypedDict):
    """What a keeper is told of the tiers; fields of `keeper.Terms`."""

    home: str
    local: str | None
    keep_local: int
    bandwidth: float | None
    patience_s: float
    hold_s: float


@dataclass(frozen=True, slots=True)
class Base:
    """The state of the tiers when a trainer looked, and what it restored: the ground of its claim.

    Both are (attempt, step); `restored` is None for a trainer that found nothing.
    """

    restored: tuple[int, int] | None
    seen: frozenset[tuple[int, int]] = frozenset()  # everything that could have been restored


class Tiers:
    """The tiers of one run, as this rank sees them.

    Args:
        home: folder or URL.
        local: folder on this host; None for no such tier.
        keep_local: how many checkpoints stay there.
        home_every: which saves go home; None for all.
        bandwidth: bytes per second that may be sent home; None for no limit.
        patience: how long home may fail.
        restore_patience: how long a restore tries again what cannot be read.
        hold: how long a keeper offers what it has in memory after the trainer's death; None for what
            HOLDFAST_HOLD says, else two minutes.

    Raises:
        InvalidInput: an argument cannot be used; or the local folder and home are one place, or one is inside
            the other.
        Unsupported: a home that other processes cannot reach.
    """

    def __init__(
        self,
        home: str | os.PathLike[str],
        local: str | os.PathLike[str] | None,
        *,
        keep_local: int,
        home_every: int | str | datetime.timedelta | Every | None,
        bandwidth: int | str | None,
        patience: Duration,
        restore_patience: Duration,
        hold: Duration | None,
    ) -> None:
        self.home = rehearsed(absolute_place(home))
        self.local = None if local is None else rehearsed(absolute_place(local))
        for place in (self.home, self.local or ""):
            if place.startswith("memory://"):
                raise Unsupported(
                    f"{place} is memory of this process, and checkpoints are written by another one. Give a "
                    "path."
                )
        if home_every is not None and local is None:
            raise InvalidInput(
                "home_every= needs local=: without a nearer place a save that does not go home is nowhere. "
                "Give local= a folder, or save less often with every=."
            )
        self._home_every = None if home_every is None else single_policies(home_every)
        self.terms = TierTerms(
            home=self.home,
            local=self.local,
            keep_local=Keep(keep_local).last or 1,
            bandwidth=None if bandwidth is None else read_bytes(bandwidth, "home_bandwidth"),
            patience_s=read_seconds(patience, "home_patience"),
            hold_s=_hold_seconds(hold),
        )
        self.restore_patience_s = read_seconds(restore_patience, "restore_patience")
        self.home_store = open_store(self.home)
        self._local_store = None if self.local is None else open_store(self.local)
        if self._local_store is not None:
            check_apart(self.home_store, self._local_store)
        now_s = time.monotonic()
        self._sent = Pace(0, now_s, saved_step=0, saved_s=now_s)  # when a save last went home
        self._is_due = False  # rank 0's clock has said so, to all ranks

    @property
    def local_store(self) -> Store | None:
        """The local folder, if there is one."""
        return self._local_store

    @property
    def is_far(self) -> bool:
        """True if saves go straight to a place beyond this machine, which may not answer for a while."""
        return self.durable_stores()[0].properties.survives_host

    def durable_stores(self) -> list[Store]:
        """All tiers but memory, nearest first."""
        return [self.home_store] if self._local_store is None else [self._local_store, self.home_store]

    # -- which saves go home ---------------------------------------------------------------------------------

    def is_due_by_clock(self, step: int) -> bool:
        """True if a policy that looks at a clock wants the save of `step` in home; rank 0 is asked."""
        return self._is_due_for(step, timed=True)

    def hear(self, *, is_due: bool, said_step: int) -> None:
        """What rank 0's clock said at `said_step`, as all ranks hear it at once."""
        self._is_due = is_due and self._sent.saved_step < said_step  # else one has gone since

    def goes_home(self, step: int, *, must: bool, alone: bool) -> bool:
        """Whether the save of `step` goes home at once; the same on every rank.

        Args:
            step: of the save, which is made now.
            must: it does in any case.
            alone: there is one rank only, so its own clock will do, also in a loop that asks nobody.
        """
        goes = (
            self._home_every is None
            or must
            or self._is_due
            or self._is_due_for(step, timed=False)
            or (alone and self._is_due_for(step, timed=True))
        )
        if goes:
            now_s = time.monotonic()
            self._is_due, self._sent = False, Pace(step, now_s, saved_step=step, saved_s=now_s)
        return goes

    def _is_due_for(self, step: int, *, timed: bool) -> bool:
        pace = Pace(step, time.monotonic(), self._sent.saved_step, self._sent.saved_s)
        return any(policy.due(pace) for policy in self._home_every or () if policy.timed == timed)

    # -- taking over and reading -----------------------------------------------------------------------------

    def newest_local_number(self) -> int:
        """Return the highest attempt number that the local folder has used; 0 without a folder.

        Raises:
            RetryLater: the store failed.
        """
        return 0 if self._local_store is None else newest_number(self._local_store)

    def claim(
        self,
        *,
        world_size: int,
        base: Base | None,
        above: int = 0,
        writers: Sequence[tuple[str, LiveTrainer]] = (),
    ) -> Attempt:
        """Claim the next attempt of the run of these tiers, which is made if it is new. Rank 0 only.

        Args:
            world_size: ranks of the attempt.
            base: what the trainer has restored; None if it will restore after the claim.
            above: the highest attempt number that local folders have used.
            writers: living trainers of this home, each with its host.

        Raises:
            Conflict: a writer lives, or has committed since the trainer looked.
            Corrupt: nothing tells the run, or the trainer would begin from zero beside lost checkpoints.
            InvalidInput: the local folder holds another run.
            Unsupported: home replaces what it is told to leave alone.
            RetryLater: a store failed.
        """
        self.home_store.check()
        check_no_writer(self.home_store, writers)
        if base is not None:
            self._check_base(base)
        run = claim_run(self.home_store)
        if self._local_store is not None:
            check_run(self._local_store, run)
        claim = claim_attempt(self.home_store, run, world_size=world_size, above=above)
        if self._local_store is not None:
            copy_claim(self._local_store, claim)
        return claim

    def check_fresh(self, base: Base) -> None:
        """Check that what a trainer has restored is still the newest; once more when it has its claim.

        Raises:
            Conflict: another attempt has committed since.
            RetryLater: a store failed.
        """
        found = {one for tier in self.durable_stores() for one in candidates(list_home(tier))}
        newer = [one for one in found - base.seen if base.restored is None or one > base.restored]
        if not newer:
            return
        attempt, step = max(newer)
        restored = "nothing" if base.restored is None else f"step {base.restored[1]}"
        raise Conflict(
            f"Attempt {attempt} has committed step {step} to {self.home} since this process looked there and "
            f"restored {restored}. Nothing was saved: it would replace what the other one has saved. Is "
            "another training at work there? Stop one of the two, and call restore() again here.",
            step=step,
        )

    def _check_base(self, base: Base) -> None:
        self.check_fresh(base)
        if base.restored is None:
            check_no_losses(find_losses(self.durable_stores()), self.home)

    def refuse_unrestored(self) -> None:
        """Refuse to save beside checkpoints by a trainer that has not looked for them. Rank 0 only.

        Raises:
            InvalidInput: there are checkpoints.
            RetryLater: a store failed.
        """
        found = [one for tier in self.durable_stores() for one in candidates(list_home(tier))]
        if found:
            raise InvalidInput(
                f"{self.home} holds checkpoints, the newest of step {max(found)[1]}, and restore() was not "
                "called: saving now would begin a new line beside them, and retention would delete them in "
                "time. Nothing was saved. Call restore() first, or begin afresh in another home."
            )

    def finish_commits(self, run: str, whole: Collection[tuple[int, int]]) -> list[tuple[int, int, str]]:
        """Write the manifests that saves of ended attempts lack. Rank 0 only, with a claim.

        Args:
            run: the run.
            whole: (attempt, step) of these saves.

        Returns:
            (step, attempt, where) of what is complete now.

        Raises:
            RetryLater: a store failed.
        """
        finished: list[tuple[int, int, str]] = []
        for tier in self.durable_stores() if whole else ():
            for (step, attempt), saved in sorted(list_home(tier).saved.items()):
                if (attempt, step) in whole and recover_commit(tier, saved, run):
                    finished.append((step, attempt, tier.url))
        return finished

    def join(self, claim: Attempt, *, fresh: bool) -> None:
        """Make the local folder of another host than rank 0's one of the run and of the attempt.

        Raises:
            InvalidInput: the folder holds another run; or `fresh`, but it holds files of checkpoints.
            RetryLater: a store failed.
        """
        assert self._local_store is not None
        if fresh and list_home(self._local_store).saved:
            raise InvalidInput(
                f"{self.local} holds files of checkpoints, and restore() was not called. Nothing was saved. "
                "Call restore() first, or begin afresh in another home and another folder."
            )
        check_run(self._local_store, claim.run)
        copy_claim(self._local_store, claim)

    def check_one_run(self) -> None:
        """Check that this rank's local folder and home are of one run.

        Raises:
            Corrupt: nothing tells the run of home.
            InvalidInput: they are not.
            RetryLater: a store failed.
        """
        if self._local_store is not None:
            check_same_run(self.home_store, self._local_store)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Store]:
        """All tiers as one store; views of memory that were taken stay."""
        held = HeldStore(self.home)
        tiers = [held, *self.durable_stores()] if held else self.durable_stores()
        try:
            yield tiers[0] if len(tiers) == 1 else Nearest(tiers)
        finally:
            held.close()

    def end_held(self) -> None:
        """Let keepers of dead trainers free what they hold in memory: nobody will restore it any more."""
        end_held(self.home)

    def mark(
        self,
        passed: Sequence[Passed],
        restored: Id | None,
        *,
        run: str | None,
        rank: int,
        is_scattered: bool,
    ) -> None:
        """Note durably what a restore passed over, in every place of this rank where retention deletes.

        Args:
            passed: checkpoints that did not verify, or could not be read.
            restored: (attempt, step) of the one whose every byte verified; a note about it is dropped.
            run: id of the run.
            rank: this rank.
            is_scattered: hosts have local folders of their own; else rank 0 does it for all.

        Raises:
            RetryLater: a store failed.
        """
        stores = self.durable_stores() if rank == 0 else self.durable_stores()[:-1] if is_scattered else []
        for store in stores:
            with contextlib.suppress(Denied):  # it takes no saves either, so nothing is deleted there
                note_passed(store, passed, run)
                if restored is not None:
                    attempt, step = restored
                    drop_note(store, step, attempt)

    def name_of(self, sources: Mapping[str, int]) -> str:
        """The tier that most bytes came from, given bytes by URL: "memory", "local" or "home"."""
        url = max(sources, key=lambda one: sources[one], default=self.home)
        return {"memory": "memory", self.local: "local", OTHER_RANKS: "local"}.get(url, "home")

    def say_sources(self, sources: Mapping[str, int]) -> str:
        """In words where bytes came from: one place, or each with its share."""
        if len(sources) < 2:
            return next(iter(sources), self.home)
        return " and ".join(f"{url} ({say_bytes(count)})" for url, count in sources.items())


def _hold_seconds(hold: Duration | None) -> float:
    value = os.environ.get("HOLDFAST_HOLD", "2m") if hold is None else hold
    return 0.0 if value in (0, "0") else read_seconds(value, "hold")
