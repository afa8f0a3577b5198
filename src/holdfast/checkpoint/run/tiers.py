"""Tiers of a run, nearest first, none in another: memory of keepers, local folder, home; and their claim."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from holdfast.checkpoint.format import run as runs
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.run import AttemptClaim
from holdfast.checkpoint.home.claim import (
    check_no_writer,
    check_run,
    claim_attempt,
    claim_run,
    copy_claim,
    newest_number,
)
from holdfast.checkpoint.home.commit import recover_commit
from holdfast.checkpoint.home.listing import LiveTrainer, candidates, list_home
from holdfast.checkpoint.home.losses import check_no_losses, find_losses
from holdfast.checkpoint.home.newest import Skipped, drop_note, note_skipped
from holdfast.checkpoint.keeper import MemoryTierStore, find_trainers
from holdfast.checkpoint.policy import single_policies
from holdfast.checkpoint.ranks import RankGroup
from holdfast.checkpoint.restore.share import OTHER_RANKS
from holdfast.checkpoint.run.options import Home, Local
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.bucket import ObjectStore
from holdfast.checkpoint.store.compressed import load_compression
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.errors import Conflict, Denied, InvalidInput, Unsupported
from holdfast.system.environment import sandboxed
from holdfast.system.linux.mounts import mount_points
from holdfast.system.units import format_bytes

Identity: TypeAlias = "tuple[object, tuple[str, ...]]"
"""The device and inode of an existing directory, and the names below it that do not exist yet."""


def check_disjoint(home: Store, local: Store) -> None:
    """Raise if the local tier and home overlap: each would delete objects of the other."""
    overlap = False
    if isinstance(home, LocalStore) and isinstance(local, LocalStore):
        mine, theirs = (Path(os.path.realpath(one.root)) for one in (home, local))
        overlap = _is_inside(mine, theirs) or _is_inside(theirs, mine)
    elif isinstance(home, ObjectStore) and isinstance(local, ObjectStore):
        overlap = home.address.overlaps(local.address)
    if overlap:
        raise InvalidInput(
            f"local={local.url} and the home {home.url} are the same place, or one is inside the other. Home "
            "would keep only the few checkpoints that the local tier keeps. Nothing was written. Set local= "
            "to a separate folder on this host's fast disk, or leave it out."
        )


def _is_inside(inner: Path, outer: Path) -> bool:
    """Return True if a path without links is `outer` or below it. Bind mounts are detected."""
    target = _identity_of(outer)
    if any(_identity_of(level) == target for level in (inner, *inner.parents)):
        return True
    (device, names), (its_device, its_names) = _path_on_device(inner), _path_on_device(outer)
    return device == its_device and names[: len(its_names)] == its_names


def _identity_of(path: Path) -> Identity:
    for level in (path, *path.parents):
        with contextlib.suppress(OSError):
            facts = level.stat()
            return (facts.st_dev, facts.st_ino), path.relative_to(level).parts
    return None, path.parts


def _path_on_device(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the file system of a path and the path within it. All bind mounts share these."""
    found: tuple[int, str, Path] = (0, "", path)
    with contextlib.suppress(OSError, ValueError):
        for mount in mount_points():
            if path.is_relative_to(mount.path) and len(mount.path.parts) >= found[0]:
                found = len(mount.path.parts), mount.device, mount.root / path.relative_to(mount.path)
    return found[1], found[2].parts


class Base(Struct, frozen=True):
    """Checkpoints that a trainer found, and the one it restored: the basis of its claim.

    `restored` is None for a trainer that found nothing.
    """

    restored: CheckpointId | None
    seen: frozenset[CheckpointId] = frozenset()  # everything that could have been restored
    is_fresh: bool = False  # nothing was restored and nothing will be, so the home must be empty


def _as_one(tiers: Sequence[Store]) -> Store:
    return tiers[0] if len(tiers) == 1 else TieredStore(tiers)


class Tiers:
    """Tiers of one run, as this rank sees them."""

    def __init__(self, home: Home, local: Local | None) -> None:
        self.home = sandboxed(absolute_place(home.url))
        self.local = None if local is None else sandboxed(absolute_place(local.path))
        for place in (self.home, self.local or ""):
            if place.startswith("memory://"):
                raise Unsupported(
                    f"{place} is memory of this process, and checkpoints are written by another one. Give a "
                    "path."
                )
        if home.every is not None and local is None:
            raise InvalidInput(
                "Home(every=) needs local=: without a local folder, a save that is not copied to home is "
                "stored nowhere. Give local= a folder, or save less often with every=."
            )
        self.home_every = None if home.every is None else single_policies(home.every)
        """Policies that send a save home; None if every save is sent."""
        self.home_store = open_store(self.home)
        self.local_store = None if self.local is None else open_store(self.local)
        if self.local_store is not None:
            check_disjoint(self.home_store, self.local_store)
        if home.compress:
            if self.local_store is None or not isinstance(self.home_store, ObjectStore):
                raise InvalidInput(
                    "Home(compress=True) compresses what is sent from a local folder to a bucket. "
                    f"Expected local= and the URL of a bucket, found local={self.local} and {self.home}."
                )
            load_compression("Home(compress=True)")

    @property
    def is_far(self) -> bool:
        """True if saves go straight to a store beyond this machine."""
        return self.durable_stores()[0].properties.survives_host

    def durable_stores(self) -> list[Store]:
        """Return all tiers but memory, nearest first."""
        return [self.home_store] if self.local_store is None else [self.local_store, self.home_store]

    def complete_checkpoints(self) -> set[CheckpointId]:
        """Return every complete checkpoint in the local folder and home."""
        return {one for tier in self.durable_stores() for one in candidates(list_home(tier))}

    # -- claim and restore -----------------------------------------------------------------------------
    def claim(
        self, ranks: RankGroup, local_ranks: tuple[int, ...], base: Base | None, *, take_over: bool
    ) -> AttemptClaim:
        """Claim the next attempt of the run for all ranks. The run is created if it is new.

        Args:
            local_ranks: ranks that share this one's local folder.
            base: basis of the claim; None if the trainer restores after it.

        Ranks: collective.
        """
        writers = [] if take_over else find_trainers(self.home)
        host = socket.gethostname()
        rows = ranks.gather([(host, one.attempt, one.rank, one.pid) for one in writers])
        near = self.local_store
        above = max(ranks.gather(0 if near is None else newest_number(near)))

        def claim() -> bytes:
            if base is not None and base.is_fresh:
                self._refuse_unrestored()
            self.home_store.check()
            living = [(host, LiveTrainer(*row)) for of_rank in rows for host, *row in of_rank]
            check_no_writer(self.home_store, living)
            if base is not None:
                self._check_base(base)
                if base.restored is None:
                    check_no_losses(find_losses(self.durable_stores()), self.home)
            run = claim_run(self.home_store)
            if near is not None:
                check_run(near, run)
            made = claim_attempt(self.home_store, run, world_size=ranks.world_size, above=above)
            if near is not None:
                copy_claim(near, made)
            return runs.document(made)

        claimed = runs.parse(AttemptClaim, ranks.of_rank_0(claim), "the claim")
        if base is not None:  # once more: after the claim no older attempt commits
            ranks.of_rank_0(lambda: self._check_base(base))
        if near is not None:
            firsts = {ranks_of_host[0] for ranks_of_host in ranks.gather(local_ranks)}
            to_join = firsts if len(firsts) > 1 else ()  # on one host, rank 0 has joined with its claim
            ranks.first_of(to_join, lambda: self._join(near, claimed, base))
        return claimed

    def _check_base(self, base: Base) -> None:
        """Check that the restored checkpoint is still the newest; done before and after the claim."""
        found = self.complete_checkpoints()
        newer = [one for one in found - base.seen if base.restored is None or one > base.restored]
        if not newer:
            return
        newest = max(newer)
        restored = "nothing" if base.restored is None else f"step {base.restored.step}"
        raise Conflict(
            f"Attempt {newest.attempt} has committed step {newest.step} to {self.home} since this process "
            f"looked there and restored {restored}. Nothing was saved: it would replace what the other one "
            "has saved. Is another training at work there? Stop one of the two, and call restore() again "
            "here.",
            step=newest.step,
        )

    def _refuse_unrestored(self) -> None:
        """Refuse to save beside checkpoints that the trainer has not restored."""
        found = self.complete_checkpoints()
        if found:
            raise InvalidInput(
                f"{self.home} holds checkpoints, the newest of step {max(found).step}, and restore() was not "
                "called: a save now would start from scratch beside them, and retention would delete them in "
                "time. Nothing was saved. Call restore() first, or start from scratch in another home."
            )

    def finish_commits(self, run: str, whole: Collection[CheckpointId]) -> list[tuple[CheckpointId, str]]:
        """Write the missing manifests of complete saves of ended attempts. Rank 0 only, with a claim.

        Return each save whose manifest was written, with the URL of the store.
        """
        finished: list[tuple[CheckpointId, str]] = []
        for tier in self.durable_stores() if whole else ():
            finished += [
                (saved.checkpoint_id, tier.url)
                for saved in list_home(tier).by_step()
                if saved.checkpoint_id in whole and recover_commit(tier, saved, run)
            ]
        return finished

    def _join(self, near: Store, claim: AttemptClaim, base: Base | None) -> None:
        """Add the local folder of another host to the run and the attempt."""
        if base is not None and base.is_fresh and list_home(near).saved:
            raise InvalidInput(
                f"{self.local} holds files of checkpoints, and restore() was not called. Nothing was saved. "
                "Call restore() first, or start from scratch in another home and another folder."
            )
        check_run(near, claim.run)
        copy_claim(near, claim)

    @contextlib.contextmanager
    def reading(self, *, is_node_local: bool, with_copies: bool) -> Iterator[tuple[Store, Store | None]]:
        """Yield all tiers as one store, and those that only this host has. Views of memory stay valid.

        Args:
            is_node_local: other hosts have other local folders.
            with_copies: memory may have whole copies of other ranks' saves, see `Peers`.
        """
        held = MemoryTierStore(self.home, with_documents=with_copies)
        tiers = [held, *self.durable_stores()] if held else self.durable_stores()
        own = [self.local_store] if self.local_store is not None and (is_node_local or with_copies) else []
        if with_copies:
            own = [held, *own]
        try:
            yield _as_one(tiers), _as_one(own) if own else None
        finally:
            held.close()

    def mark(
        self,
        skipped: Sequence[Skipped],
        restored: CheckpointId | None,
        *,
        run: str | None,
        rank: int,
        is_node_local: bool,
    ) -> None:
        """Record durably which checkpoints a restore skipped, in every tier where retention deletes.

        A note about the restored one is deleted. If hosts have local folders of their own, `is_node_local`,
        each rank does it there; else rank 0 does it for all.
        """
        stores = self.durable_stores() if rank == 0 else self.durable_stores()[:-1] if is_node_local else []
        for store in stores:
            with contextlib.suppress(Denied):  # it takes no saves either, so nothing is deleted there
                note_skipped(store, skipped, run)
                if restored is not None:
                    drop_note(store, restored)

    def name_of(self, sources: Mapping[str, int]) -> str:
        """Return the tier that most bytes came from: "memory", "local" or "home"."""
        url = max(sources, key=lambda one: sources[one], default=self.home)
        of_others = "memory" if self.local is None else "local"
        return {"memory": "memory", self.local: "local", OTHER_RANKS: of_others}.get(url, "home")

    def describe_sources(self, sources: Mapping[str, int]) -> str:
        """Return the source of restored bytes as text: one URL, or each with its number of bytes."""
        if len(sources) < 2:
            return next(iter(sources), self.home)
        return " and ".join(f"{url} ({format_bytes(count)})" for url, count in sources.items())
