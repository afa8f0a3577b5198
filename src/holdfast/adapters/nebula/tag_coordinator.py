"""Ranks that save a tag together: their files so far, and the agreed plan."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, distributed_c10d
from torch.distributed.distributed_c10d import Store

from holdfast.checkpoint.format.hashes import digest
from holdfast.errors import InvalidInput, RetryLater
from holdfast.system.documents import decode_dataclass, decode_object
from holdfast.system.environment import read_integer

_LEAVE_LIMIT = datetime.timedelta(seconds=30)
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class TagPlan:
    """Plan of how a tag becomes a checkpoint. The rank that completes the tag decides it for all."""

    members: tuple[int, ...]  # ranks whose files are in the checkpoint
    step: int
    begins: bool  # starts a new attempt
    base: int | None  # step that a new attempt continues
    to_home: bool  # copied to home, because the interval has passed


class TagCoordinator:
    """Counters and values in the store of the process group.

    Without a group, they are in this process's memory.
    """

    def __init__(self, home: str, number: int) -> None:
        self.rank, self.world_size = world()
        # Kept as long as this object: on the rank that serves the store, it ends with its last reference.
        self._default = distributed_c10d._get_default_store() if self.world_size > 1 else None
        own: Any = dist  # torch exports HashStore, but not in its type stubs
        self.store: Store = own.HashStore() if self._default is None else _connection(self._default)
        self.name = f"holdfast/nebula/{digest(home.encode())[:12]}/{number}"

    def join(self, tag: str) -> None:
        """Register this rank as a member of a tag."""
        self.store.set(f"{self.name}/{tag}/by/{self.rank}", "")

    def count(self, tag: str) -> int:
        """Count one more file of a tag; return the number of files that all ranks have saved."""
        number = self.store.add(f"{self.name}/{tag}/files", 1)
        self.store.set(f"{self.name}/{tag}/file/{number}", str(self.rank))
        return number

    def savers(self, tag: str, num_files: int) -> tuple[int, ...]:
        """Return the ranks that saved the first `num_files` files of a tag.

        Ranks that were late are not included.
        """
        return tuple(sorted({self._saver(tag, number) for number in range(1, num_files + 1)}))

    def _saver(self, tag: str, number: int) -> int:
        key, deadline_s = f"{self.name}/{tag}/file/{number}", time.monotonic() + _LEAVE_LIMIT.total_seconds()
        while not self.store.check([key]):
            if time.monotonic() > deadline_s:
                raise RetryLater(
                    f"A rank has died while it was counting file {number} of {tag}. Nothing was saved."
                )
            time.sleep(_POLL_S)
        return int(self.store.get(key))

    def files(self, tag: str) -> int:
        """Return the number of files of a tag that all ranks have saved so far."""
        return self.store.add(f"{self.name}/{tag}/files", 0)

    def members(self, tag: str) -> tuple[int, ...]:
        """Return the ranks that have joined a tag so far."""
        return tuple(r for r in range(self.world_size) if self.store.check([f"{self.name}/{tag}/by/{r}"]))

    def propose(self, tag: str, plan: TagPlan) -> TagPlan:
        """Propose a plan for a tag; return the plan that a rank proposed first."""
        return _plan(self.store.compare_set(f"{self.name}/{tag}/plan", "", json.dumps(asdict(plan))))

    def plan(self, tag: str) -> TagPlan | None:
        """Return the plan for a tag, or None."""
        key = f"{self.name}/{tag}/plan"
        return _plan(self.store.get(key)) if self.store.check([key]) else None

    def claim_run(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that save in this run: `members`, unless a rank has claimed it before."""
        key, text = f"{self.name}/members", json.dumps(members)
        found = decode_object(
            b'{"members":%s}' % self.store.compare_set(key, "", text), "the ranks that save"
        )
        return found.integers("members")

    def leave(self, members: tuple[int, ...]) -> None:
        """Wait until this rank may exit: the first rank serves the store, so it leaves last."""
        if len(members) < 2:
            return
        with contextlib.suppress(DistError):  # the rank that served the store has exited
            self.store.set(f"{self.name}/left/{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"{self.name}/left/{rank}" for rank in members], _LEAVE_LIMIT)

    def publish(self, key: str, number: int | None) -> None:
        """Publish a value for all ranks, replacing the last one."""
        self.store.set(f"{self.name}/value/{key}", "" if number is None else str(number))

    def published(self, key: str) -> int | None:
        """Return a value that a rank has published, or None."""
        key = f"{self.name}/value/{key}"
        text = self.store.get(key) if self.store.check([key]) else b""
        return int(text) if text else None


def _plan(text: bytes) -> TagPlan:
    return decode_dataclass(TagPlan, text, "the plan for a tag")


def is_grouped() -> bool:
    """Return True if a process group exists."""
    return dist.is_available() and dist.is_initialized()


def world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if is_grouped():
        return dist.get_rank(), dist.get_world_size()
    if (world_size := read_integer("WORLD_SIZE", 1, minimum=1)) > 1:
        raise InvalidInput(
            f"WORLD_SIZE is {world_size}, but there is no process group, so the ranks "
            "cannot agree on a checkpoint. Nothing was saved. Call "
            "torch.distributed.init_process_group() before the first save."
        )
    return 0, 1


def own_rank() -> int:
    """Return this process's rank, which is also valid before a process group exists."""
    if is_grouped():
        return dist.get_rank()
    return read_integer("RANK", 0)


def _connection(store: Store) -> Store:
    """Return a new connection to a store, so that training's own is not blocked."""
    return store.clone() if hasattr(store, "clone") else store  # type: ignore[attr-defined]
