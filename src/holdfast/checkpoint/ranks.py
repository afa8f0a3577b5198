"""Communication of the ranks of a run: rare, in small values, and never during a save."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, final

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed import distributed_c10d
from typing_extensions import override

from holdfast import __version__
from holdfast.checkpoint.format.messages import pack, unpack
from holdfast.errors import Conflict, HoldfastError, InvalidInput, RetryLater, Unsupported
from holdfast.system.environment import read_integer
from holdfast.system.log import QUIET_S, get_logger, reported_if_slow

_T = TypeVar("_T")
_log = get_logger("checkpoint.ranks")
_EVERY_RANK = (
    "Every rank has to call save(), restore(), should_save() and close(): remove conditions such as "
    "`if rank == 0:` around them."
)
_BARRIER_TIMEOUT = datetime.timedelta(seconds=30)
_numbers = itertools.count()  # of the Ranks of this process, equal on every rank: making one is collective
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def forget() -> None:
    """Give the next Ranks of this process the number 0 again, as in a new process."""
    global _numbers
    _numbers = itertools.count()


class RankOutcome(Struct, Generic[_T], frozen=True):
    """Outcome of one rank's work: its value, or the error that it raised."""

    rank: int
    value: _T | None = None
    error: Exception | None = None


class RankGroup(ABC):
    """Group of ranks that save together, as one of them sees it. Implementations are final.

    Attributes:
        rank: number of this rank.
        world_size: number of ranks.
    """

    rank: int
    world_size: int

    @abstractmethod
    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, by rank.

        Raises:
            RetryLater: a rank did not answer in time.

        Ranks: collective.
        Blocks: until every rank has called it.
        """

    @abstractmethod
    def share(self, value: _T) -> _T:
        """Return rank 0's value on every rank.

        Raises:
            RetryLater: rank 0 did not answer in time.

        Ranks: collective.
        Blocks: until rank 0 has called it.
        """

    @abstractmethod
    def exchange_flags(
        self, step: int, flags: tuple[bool, ...], numbers: tuple[int, ...]
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Send flags and numbers, and return the outcome of the call before. Collective.

        Returns:
            For each flag whether it was true on any rank; and the lowest of each number.
        """

    @abstractmethod
    def barrier_and_close(self) -> None:
        """Complete the pending exchange, and wait for every rank. Collective."""

    def send(self, data: torch.Tensor, to: int) -> dist.Work:
        """Start sending a CPU tensor to a rank, which must call `receive` for it.

        Raises:
            RetryLater: the rank cannot be reached.
            Unsupported: ranks of this group only exchange values.
        """
        raise Unsupported(f"Ranks of {type(self).__name__} cannot exchange tensors.")

    def receive(self, data: torch.Tensor, source: int) -> dist.Work:
        """Start receiving a CPU tensor from a rank, which must call `send` for it.

        Raises:
            RetryLater: the rank cannot be reached.
            Unsupported: ranks of this group only exchange values.
        """
        raise Unsupported(f"Ranks of {type(self).__name__} cannot exchange tensors.")

    def agree(self, work: Callable[[], _T]) -> list[RankOutcome[_T]]:
        """Call `work` on every rank, and return the outcomes of all, by rank.

        An error of `work` is part of the outcome, so that no rank is missing from the next collective call.
        An error that is not Holdfast's arrives at the other ranks as a HoldfastError.

        Args:
            work: returns a value that `format.messages.pack` takes.

        Raises:
            RetryLater: a rank did not answer in time.

        Ranks: collective.
        """
        value, error = _call(work)
        rows = self.gather((value, _as_ours(error)))
        outcomes = [RankOutcome(rank, *row) for rank, row in enumerate(rows)]
        outcomes[self.rank] = RankOutcome(self.rank, value, error)  # the error itself, with its traceback
        return outcomes

    def first_of(self, ranks: Collection[int], work: Callable[[], _T]) -> _T | None:
        """Call `work` on some ranks, and return the result of the lowest one everywhere.

        Raises:
            HoldfastError: what any of them raised, on every rank.

        Ranks: collective, with the same `ranks`.
        """
        outcomes = self.agree(lambda: work() if self.rank in ranks else None)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return outcomes[min(ranks)].value if ranks else None

    def of_rank_0(self, work: Callable[[], _T]) -> _T:
        """Call `work` on rank 0, and return its result on every rank.

        Raises:
            HoldfastError: what rank 0 raised, on every rank.

        Ranks: collective.
        """
        return cast("_T", self.first_of((0,), work))

    def on_first(self, work: Callable[[], _T]) -> RankOutcome[_T]:
        """Call `work` on rank 0, and return its outcome everywhere. For values too large to gather.

        Ranks: collective.
        """
        value, error = _call(work) if self.rank == 0 else (None, None)
        outcome = RankOutcome(0, *self.share((value, _as_ours(error))))
        return RankOutcome(0, value, error) if self.rank == 0 else outcome

    def all_here(self) -> bool:
        """Return True if every rank runs on this host.

        Ranks: collective.
        """
        return len(set(self.gather(this_host()))) == 1

    def is_first_here(self) -> bool:
        """Return True on the lowest rank of each host.

        Ranks: collective.
        """
        here = this_host()
        return self.gather(here).index(here) == self.rank

    def ranks_sharing(self, folder: str) -> tuple[int, ...]:
        """Return the ranks that share `folder` with this one, itself among them: those of this host.

        Ranks that name different folders see different bytes, on whatever hosts they are. On several hosts a
        folder of the same name counts as several.

        Ranks: collective.
        """
        here = (*this_host(), folder)
        return tuple(rank for rank, place in enumerate(self.gather(here)) if place == here)


def world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (world_size := read_integer("WORLD_SIZE", 1, minimum=1)) > 1:
        raise InvalidInput(
            f"WORLD_SIZE is {world_size} but there is no process group, so the ranks cannot agree on a "
            "checkpoint. Call torch.distributed.init_process_group() before making the Checkpointer, or "
            "before the first save with Nebula's interface."
        )
    return 0, 1


@final
class Ranks(RankGroup):
    """Ranks of torch.distributed, over a gloo group of our own; a single rank without it.

    Args:
        timeout_s: how long to wait for a rank that does not answer.

    Ranks: making one is collective over the default process group.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.rank, self.world_size = world()
        self._group: dist.ProcessGroup | None = None
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None  # under way
        self._timeout_s = timeout_s
        self._number = next(_numbers)
        if self.world_size > 1:
            # A group of its own: its collectives must never match those of training.
            group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
            self._group = group
            self._store = distributed_c10d._get_default_store()

    @override
    def gather(self, value: _T) -> list[_T]:
        if self._group is None:
            return [value]
        mine = bytearray(pack(value))
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
        try:
            with self._reported():
                dist.all_gather(sizes, torch.tensor([len(mine)], device="cpu"), group=self._group)
            longest = max(int(size) for size in sizes)
            rooms = [bytearray(longest) for _ in sizes]
            padded = mine.ljust(longest, b" ")
            dist.all_gather([_tensor(room) for room in rooms], _tensor(padded), group=self._group)
        except RuntimeError as error:
            raise self._no_answer(error) from error
        return [
            unpack(room[: int(size)], f"rank {rank}")
            for rank, (room, size) in enumerate(zip(rooms, sizes, strict=True))
        ]

    @override
    def share(self, value: _T) -> _T:
        if self._group is None:
            return value
        room = bytearray(pack(value) if self.rank == 0 else b"")
        size = torch.tensor([len(room)], device="cpu")
        try:
            with self._reported():
                dist.broadcast(size, src=0, group=self._group)
            room = room if self.rank == 0 else bytearray(int(size))
            dist.broadcast(_tensor(room), src=0, group=self._group)
        except RuntimeError as error:
            raise self._no_answer(error) from error
        return unpack(room, "rank 0")

    @override
    def send(self, data: torch.Tensor, to: int) -> dist.Work:
        return self._started(lambda: dist.isend(data, dst=to, group=self._group))

    @override
    def receive(self, data: torch.Tensor, source: int) -> dist.Work:
        return self._started(lambda: dist.irecv(data, src=source, group=self._group))

    def _started(self, start: Callable[[], dist.Work | None]) -> dist.Work:
        try:
            work = start()
        except RuntimeError as error:
            raise self._no_answer(error) from error
        assert work is not None
        return work

    @override
    def exchange_flags(
        self, step: int, flags: tuple[bool, ...], numbers: tuple[int, ...]
    ) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        # It runs in the background of the training step between two calls, so it costs next to nothing. At
        # first no flag is true, and each number is -1. A single rank receives what it sends at once.
        if self._group is None:
            return flags, numbers
        received = self._finish_exchange(len(flags), len(numbers))
        values = [step, -step, *(-number for number in numbers), *flags]
        sent = torch.tensor(values, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._exchange = (sent, work)
        return received

    def _finish_exchange(self, num_flags: int, num_numbers: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        if self._exchange is None:
            return (False,) * num_flags, (-1,) * num_numbers
        (reduced, work), self._exchange = self._exchange, None
        try:
            with contextlib.nullcontext() if work.is_completed() else self._reported():
                work.wait()
        except RuntimeError as error:
            raise self._no_answer(error) from error
        highest, lowest, *rest = reduced.tolist()
        if highest != -lowest:
            raise InvalidInput(
                f"The ranks are at different steps: the first at {-lowest}, the last at {highest}. Every "
                "rank must call should_save() after each step, with the same number.",
                rank=self.rank,
            )
        return tuple(map(bool, rest[num_numbers:])), tuple(-number for number in rest[:num_numbers])

    def _no_answer(self, error: RuntimeError) -> RetryLater:
        return RetryLater(
            f"Rank {self.rank} could not reach the other {self.world_size - 1} ranks within "
            f"{self._timeout_s:.0f} s: {error}. One of them has died, hangs, or has not made this call; look "
            f"at their messages. {_EVERY_RANK}",
            rank=self.rank,
        )

    def _reported(self) -> contextlib.AbstractContextManager[None]:
        """Log a line if the block takes more than a few seconds."""
        text = f"rank {self.rank} has waited {QUIET_S:.0f} s for other ranks. {_EVERY_RANK}"
        return reported_if_slow(lambda: _log.warning(text))

    @override
    def barrier_and_close(self) -> None:
        # gloo fails a completed collective if the process of a peer ends before this one notices it. So the
        # last barrier uses the store, and rank 0, which serves it, ends last. For dead ranks it waits 30 s.
        if self._group is None:
            return
        self._finish_exchange(0, 0)
        with contextlib.suppress(dist.DistError):  # a rank has died; nothing is left to be lost
            with self._reported():
                self._meet("here", range(self.world_size))
            self._meet("gone", range(self.world_size) if self.rank == 0 else ())

    def _meet(self, where: str, ranks: Iterable[int]) -> None:
        key = f"holdfast/{self._number}/{where}"
        self._store.set(f"{key}/{self.rank}", "")
        self._store.wait([f"{key}/{rank}" for rank in ranks], _BARRIER_TIMEOUT)


def check_versions(ranks: RankGroup) -> None:
    """Raise if the ranks run different versions of Holdfast, whose parts would not fit together.

    Ranks: collective.
    """
    versions = ranks.gather(__version__)
    if len(set(versions)) > 1:
        firsts = ", ".join(f"{one} on rank {versions.index(one)}" for one in sorted(set(versions)))
        raise Conflict(
            f"The ranks run different versions of Holdfast, such as {firsts}. Nothing was saved or restored. "
            "Install the same version on every host, and start again."
        )


def _call(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - it is part of the outcome, which the caller checks
        return None, error


def _as_ours(error: Exception | None) -> HoldfastError | None:
    """Return an error as one that can be sent to other ranks."""
    if error is None or isinstance(error, HoldfastError):
        return error
    return HoldfastError(f"{type(error).__name__}: {error}")


def values_of(outcomes: Iterable[RankOutcome[_T]], rank: int, failure: str) -> list[_T]:
    """Return the values of all ranks, by rank, or raise as `raise_first` does."""
    found = list(outcomes)
    raise_first(found, rank, failure)
    return [one.value for one in found]  # pyright: ignore[reportReturnType] - without an error it is a value


def raise_first(outcomes: Iterable[RankOutcome[Any]], rank: int, failure: str) -> None:
    """Raise this rank's own error, else that of the first rank with one, which is named.

    Args:
        failure: what a rank failed to do, such as "could not list the home".
    """
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return
    first = next((outcome for outcome in failed if outcome.rank == rank), failed[0])
    error = first.error
    assert error is not None
    if first.rank == rank or not isinstance(error, HoldfastError):
        raise error
    raise type(error)(
        f"Rank {first.rank} {failure}: {error}", step=error.step, rank=first.rank, key=error.key
    ) from error


def this_host() -> tuple[str, str]:
    """Return the identity of this host, other after each boot."""
    try:
        return socket.gethostname(), _BOOT_ID.read_text()
    except FileNotFoundError:
        return socket.gethostname(), ""
    except OSError as error:
        raise RetryLater(
            f"This machine could not be identified: {_BOOT_ID} cannot be read: {error.strerror}. Nothing was "
            "saved or restored. Start again; if the error stays, look at the kernel's log of this machine.",
            key=str(_BOOT_ID),
        ) from error


def _tensor(room: bytearray) -> torch.Tensor:
    """Return a tensor that shares its memory with `room`."""
    return torch.frombuffer(room, dtype=torch.uint8)
