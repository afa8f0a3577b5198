"""What ranks tell each other about tags: who has saved how many files, and what was decided."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, distributed_c10d
from torch.distributed.distributed_c10d import Store

from holdfast.documents import decode_dataclass, decode_object
from holdfast.errors import InvalidInput, RetryLater
from holdfast.format.hashes import digest

_LEAVE = datetime.timedelta(seconds=30)
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Plan:
    """How a tag becomes a checkpoint, as the rank that completed it decided it for all."""

    members: tuple[int, ...]  # the ranks whose files it holds
    step: int
    begins: bool  # with a new attempt
    base: int | None  # step that this attempt goes on from
    to_home: bool  # whether the clock says so

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> Plan:
        """Return the plan in a JSON text.

        Raises:
            Corrupt: it is no plan.
        """
        return decode_dataclass(cls, text, "the plan for a tag")


class Board:
    """Counters and notes in the store of the process group; in this process's memory where there is none.

    Args:
        home: of which run they are.
        number: how many boards for it this process has had before; alike on every rank.
    """

    def __init__(self, home: str, number: int) -> None:
        self.rank, self.world_size = world()
        # Held as long as this one: on the rank that serves it, it ends with the last who holds it.
        self._default = distributed_c10d._get_default_store() if self.world_size > 1 else None
        own: Any = dist  # torch exports HashStore, but does not say so
        self.store: Store = own.HashStore() if self._default is None else _connection(self._default)
        self.name = f"holdfast/nebula/{digest(home.encode())[:12]}/{number}"

    def join(self, tag: str) -> None:
        """Say that this rank takes part in a tag."""
        self.store.set(f"{self.name}/{tag}/by/{self.rank}", "")

    def count(self, tag: str) -> int:
        """Count one more file of a tag; answers how many all ranks have saved now."""
        number = self.store.add(f"{self.name}/{tag}/files", 1)
        self.store.set(f"{self.name}/{tag}/file/{number}", str(self.rank))
        return number

    def savers(self, tag: str, num_files: int) -> tuple[int, ...]:
        """The ranks that saved the first so many files of a tag: who came too late is not among them.

        Raises:
            RetryLater: a rank has counted a file and not said that it did.

        Blocks: while a rank is between these two words, at most 30 s.
        """
        return tuple(sorted({self._saver(tag, number) for number in range(1, num_files + 1)}))

    def _saver(self, tag: str, number: int) -> int:
        key, deadline_s = f"{self.name}/{tag}/file/{number}", time.monotonic() + _LEAVE.total_seconds()
        while not self.store.check([key]):
            if time.monotonic() > deadline_s:
                message = f"A rank has died while it counted file {number} of {tag}. Nothing was saved."
                raise RetryLater(message)
            time.sleep(_POLL_S)
        return int(self.store.get(key))

    def files(self, tag: str) -> int:
        """How many files of a tag all ranks have saved so far."""
        return self.store.add(f"{self.name}/{tag}/files", 0)

    def members(self, tag: str) -> tuple[int, ...]:
        """The ranks that take part so far in a tag that `commit` completes."""
        return tuple(r for r in range(self.world_size) if self.store.check([f"{self.name}/{tag}/by/{r}"]))

    def propose(self, tag: str, plan: Plan) -> Plan:
        """The plan for a tag: this one, if no other rank was first."""
        return Plan.parse(self.store.compare_set(f"{self.name}/{tag}/plan", "", plan.text()))

    def plan(self, tag: str) -> Plan | None:
        """The plan for a tag, if there is one."""
        key = f"{self.name}/{tag}/plan"
        return Plan.parse(self.store.get(key)) if self.store.check([key]) else None

    def claim_run(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that save in this run: these, if nobody has saved before."""
        key, told = f"{self.name}/members", json.dumps(members)
        found = decode_object(
            b'{"members":%s}' % self.store.compare_set(key, "", told), "the ranks that save"
        )
        return found.integers("members")

    def leave(self, members: tuple[int, ...]) -> None:
        """Say that this rank needs nothing more; the first rank, which serves the store, goes last.

        Blocks: the first rank until the others have left, at most 30 s.
        """
        if len(members) < 2:
            return
        with contextlib.suppress(DistError):  # who served the store has not waited
            self.store.set(f"{self.name}/left/{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"{self.name}/left/{rank}" for rank in members], _LEAVE)

    def note(self, what: str, number: int | None) -> None:
        """Leave a number for all ranks; the last word counts."""
        self.store.set(f"{self.name}/note/{what}", "" if number is None else str(number))

    def noted(self, what: str) -> int | None:
        """A number that some rank has left."""
        key = f"{self.name}/note/{what}"
        text = self.store.get(key) if self.store.check([key]) else b""
        return int(text) if text else None


def is_grouped() -> bool:
    """True while there is a process group."""
    return dist.is_available() and dist.is_initialized()


def world() -> tuple[int, int]:
    """This process's rank, and the number of ranks.

    Raises:
        InvalidInput: a launcher has started several, and there is no process group by which they could agree.
    """
    if is_grouped():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        message = (
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but there is no process group, so the ranks cannot "
            "agree on who saves what. Nothing was saved. Call torch.distributed.init_process_group() "
            "before the "
            "first save."
        )
        raise InvalidInput(message)
    return 0, 1


def own_rank() -> int:
    """This process's rank, also before there is a process group."""
    if is_grouped():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _connection(store: Store) -> Store:
    """A connection of our own to a store, so that no thread waits for one of training's."""
    return store.clone() if hasattr(store, "clone") else store  # type: ignore[attr-defined]
