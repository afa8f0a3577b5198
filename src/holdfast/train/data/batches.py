"""Batches in an order shared by all ranks: each unit once per epoch, resumable at any batch.

The order of GlobalBatches is computed instead of stored.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from typing_extensions import override

from holdfast.checkpoint.state.loader_watch import num_returned
from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.system.callsite import warn
from holdfast.system.rawbytes import view_bytes
from holdfast.system.units import plural
from holdfast.train.data import progress
from holdfast.train.data.progress import Cursor, GlobalBatch, Pass, Ranges

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MAX_AHEAD = 8  # steps that a program may read ahead of training, besides the worker processes of a loader


class Batches(ABC):
    """This rank's share of each global batch, epoch after epoch: a `batch_sampler=` for a DataLoader.

    A batch is drawn for all ranks together and divided among them, so its contents do not depend on their
    number. Put this object into the state of a Checkpointer, and a resumed run continues with the next batch
    on any number of ranks and worker processes. Each unit occurs once per epoch, on one rank. All ranks get
    the same number of batches.

    The last two batches of an epoch share the remaining units, so neither is larger than `batch_size` or
    smaller than half of it. If that is fewer units than ranks, they become one batch. After a resume in
    mid-epoch on more ranks, a remainder of fewer units than ranks is dropped.

    A loader with worker processes draws batches ahead of training. The position in the data is that of the
    samples which completed optimizer steps have used: the Checkpointer calls `complete_steps`. Without a
    Checkpointer call it yourself, or the position is that of the batches drawn.

    In worker processes the generators of torch, numpy and random are seeded for each batch, from seed, epoch,
    place and rank. So random augmentation is the same after a resume, and with any number of workers from 1.

    Args:
        batch_size: units of all ranks in one optimizer step.
        seed: random seed of the order, and of the random numbers in workers.
        accumulation_steps: number of batches that each rank's share is divided into, for gradient
            accumulation. Iteration yields that many batches per optimizer step.
        drop_last: drop the remaining units at the end of an epoch, so that all batches have the same size.
        rank: this rank's number. Default: the rank in torch.distributed, or 0.
        world_size: number of ranks. Default: the world size in torch.distributed, or 1.

    Raises:
        InvalidInput: an argument is out of range, or a batch has fewer units than there are ranks.

    Ranks: not collective; every rank makes it with the same arguments, apart from `rank`.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        accumulation_steps: int = 1,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        has_ranks = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if has_ranks else 0
        self.world_size = world_size or (dist.get_world_size() if has_ranks else 1)
        self.batch_size, self.accumulation_steps = batch_size, accumulation_steps
        self.drop_last, self.seed = drop_last, seed
        if not 0 <= self.rank < self.world_size or accumulation_steps < 1 or batch_size < self._num_shares:
            raise InvalidInput(
                f"A batch of {batch_size} cannot be divided for rank {self.rank} of {self.world_size} with "
                f"{accumulation_steps=}: it needs at least one unit per rank and accumulation step.",
                rank=self.rank,
            )
        self._layout = progress.EpochLayout(batch_size, self._num_shares, drop_last, self._count_units)
        self._progress = progress.BatchProgress(self._layout)
        self._newest: weakref.ref[_Epoch] | None = None
        self._has_warned = False

    @property
    def _num_shares(self) -> int:
        return self.world_size * self.accumulation_steps

    @abstractmethod
    def _count_units(self, epoch: int) -> int:
        """Return the number of units of an epoch, at least one."""

    @abstractmethod
    def _units(self, epoch: int, offsets: Sequence[int]) -> list[int]:
        """Return the units at some places of an epoch's order."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the facts that the order depends on, besides the seed. A resume compares them."""

    def _check_samples(self, number: int, settings: str = "", *, is_wrong: bool = False) -> None:
        """Raise if some samples do not fill one batch, or if a setting is wrong."""
        if is_wrong or number < (self.batch_size if self.drop_last else self._num_shares):
            raise InvalidInput(
                f"{plural(number, 'sample')} do not fill one batch of {self.batch_size} for "
                f"{plural(self.world_size, 'rank')} (accumulation_steps={self.accumulation_steps}, "
                f"drop_last={self.drop_last}{settings}).",
                rank=self.rank,
            )

    # -- iteration -------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[list[int]]:
        """Return this rank's remaining batches of the epoch. The next call starts another epoch.

        Once steps are counted, batches of an unfinished iteration that no step has used are yielded again.

        Raises:
            InvalidInput: a loader was given this object as `sampler=`, and would group batches into batches.
        """
        of_caller = sys._getframe(1).f_locals
        _check_use(of_caller, self)
        separate_from_training(of_caller.get("loader"), self.seed)
        return _Epoch(self)

    def __len__(self) -> int:
        """Return the number of batches of a complete epoch on this rank."""
        num_batches = self._layout.num_batches(self._count_units(self.epoch))
        return num_batches * self.accumulation_steps

    def _share(self, batch: GlobalBatch, part: int) -> list[int]:
        """Return this rank's units of one part of a batch."""
        offsets = batch.offsets[part * self.world_size + self.rank :: self._num_shares]
        place = f"{self.seed}/{batch.before.epoch}/{batch.stretches[0][0]}/{part}/{self.rank}"
        return SeededUnits(self._units(batch.before.epoch, offsets), place)

    # -- position --------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._progress.cursor.epoch

    @property
    def position(self) -> int:
        """Units that completed steps of the run have used or passed over, on all ranks.

        Epochs are numbered through: the first unit of an epoch follows the last of the one before.
        """
        return self._progress.cursor.position

    @property
    def skipped(self) -> Ranges:
        """Ranges of positions that are left out for ever."""
        return self._progress.skipped

    def complete_steps(self, num_steps: int) -> None:
        """Count completed optimizer steps. The position moves behind their samples.

        The Checkpointer calls it for the objects of its state. From the first call on, the position counts
        completed steps and not drawn batches; a call with 0 only begins this.

        Ranks: not collective; every rank calls it for the same steps.
        """
        self._progress.complete(num_steps)

    def skip(self, start: int, stop: int) -> None:
        """Leave the samples at positions [start, stop) out for ever. A position among them moves to `stop`.

        A loader that is being read continues after them. Samples that it has read already are still
        delivered, once.

        Ranks: not collective; every rank calls it with the same range.
        """
        self._progress.skip(start, stop)

    # -- state -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the position, the skipped ranges, and the facts that the order depends on."""
        self._check_count()
        return self._state_of(self._progress.cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, on any number of ranks.

        Raises:
            InvalidInput: the data, batch size or seed differ from those of `state`.
        """
        mine, was = self._order_identity(), state["order"]
        if differing := [name for name in mine if was.get(name) != mine[name]]:
            changes = ", ".join(f"{name} was {was.get(name)}, is {mine[name]}" for name in differing)
            raise InvalidInput(
                f"The order of batches cannot be resumed: {changes}. The rest of the epoch would "
                "repeat or skip samples. Use the same data and settings, or remove this object from "
                "the state.",
                rank=self.rank,
            )
        epoch, start = state["epoch"], state.get("epoch_start")
        if start is None:  # saved before positions were numbered through
            start = sum(self._count_units(one) for one in range(epoch))
        skipped: Ranges = ()
        for low, high in state.get("skipped", ()):
            skipped = progress.add_range(skipped, low, high)
        self._progress.load(Cursor(epoch, start, start + state["taken"]), skipped)

    def _state_of(self, cursor: Cursor) -> dict[str, Any]:
        return {
            "epoch": cursor.epoch,
            "epoch_start": cursor.epoch_start,
            "taken": cursor.position - cursor.epoch_start,
            "skipped": [list(one) for one in self.skipped],
            "order": self._order_identity(),
        }

    def _order_identity(self) -> dict[str, Any]:
        common = {"batch_size": self.batch_size, "seed": self.seed, "drop_last": self.drop_last}
        return {**common, **self._identity()}

    def _check_count(self) -> None:
        """Warn once if the loader returned other batches than the completed steps have used."""
        epoch = self._newest() if self._newest is not None else None
        if epoch is None or self._has_warned or not self._progress.counts_steps:
            return
        returned = num_returned(epoch)
        num_used = epoch.drawer.num_completed * self.accumulation_steps
        if returned is None or 0 <= returned - num_used <= _MAX_AHEAD * self.accumulation_steps:
            return
        self._has_warned = True
        warn(
            f"The run will not resume exactly: the data loader has returned {returned} batches of this "
            f"epoch, and the completed steps have used {num_used}. Each optimizer step that the Checkpointer "
            "completes counts as one global batch: give the batches `accumulation_steps=` if a step uses "
            "several, and count each optimizer step once.",
            ResumeWarning,
        )


class _Epoch:
    """The rest of one epoch. Has its own state for loaders that save their iterator."""

    def __init__(self, batches: Batches) -> None:
        self.drawer = Pass(self)
        self._batches = batches
        self._progress = batches._progress
        self._batch: GlobalBatch | None = None  # some of its parts are not returned yet
        self._part = 0

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> list[int]:
        if self._batch is None and not self._draw():
            raise StopIteration
        batch, part = self._batch, self._part
        assert batch is not None
        self._part += 1
        if self._part == self._batches.accumulation_steps:
            self._progress.finish_draw(batch)
            self._batch = None
        return self._batches._share(batch, part)

    def _draw(self) -> bool:
        if self.drawer.cursor is None:
            self._batches._newest = weakref.ref(self)
        self._batch, self._part = self._progress.draw(self.drawer), 0
        return self._batch is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch."""
        if self._batch is not None:
            cursor, part = self._batch.before, self._part
        else:
            cursor, part = self.drawer.cursor or self._progress.cursor, 0
        return {**self._batches._state_of(cursor), "part": part, "is_ended": self.drawer.is_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`."""
        self._batches.load_state_dict(state)
        self.drawer, self._batch = Pass(self), None
        if state.get("part") and self._draw():
            self._part = state["part"]


def _check_use(of_caller: Mapping[str, Any], batches: Batches) -> None:
    """Raise if a sampler that groups single samples, such as BatchSampler, iterates over batches."""
    caller = of_caller.get("self")
    size = of_caller.get("batch_size", getattr(caller, "batch_size", None))
    if getattr(caller, "sampler", None) is not batches or size is None:
        return
    name = type(batches).__name__
    raise InvalidInput(
        f"A DataLoader was given {name} as sampler=, which yields single samples. {name} yields whole "
        f"batches, so the loader would make batches of {size} batches. Nothing was read. "
        "Pass it as DataLoader(data, batch_sampler=...), without batch_size, shuffle and drop_last.",
        rank=batches.rank,
    )


def keep_two(kept: dict[_Key, _Value], key: _Key, make: Callable[[], _Value]) -> _Value:
    """Return the value of a key. It is made unless it is one of the newest two, which are kept."""
    if key not in kept:
        while len(kept) > 1:
            del kept[next(iter(kept))]
        kept[key] = make()
    return kept[key]


def fingerprint(lengths: Sequence[int]) -> str:
    """Return a short digest of the lengths, to detect other data."""
    data = torch.as_tensor(lengths, dtype=torch.int64)
    return f"{len(lengths)} of {int(data.sum())} tokens, {zlib.crc32(view_bytes(data.contiguous())):08x}"


class SeededUnits(list[int]):
    """Units of a batch, which seed the generators of the worker process that receives them.

    A loader sends them to whichever worker is free. So what a data set draws for a batch depends on the
    batch, not on the number of workers, on what they have read before, or on where a run has resumed.
    """

    def __init__(self, units: Iterable[int], place: str) -> None:
        super().__init__(units)
        self._place = place

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive, (list(self), self._place)


def _receive(units: list[int], place: str) -> list[int]:
    """Return the units of a batch. In a worker, first seed torch, numpy and random for it."""
    if get_worker_info() is not None:
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little") >> 1
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    return units


def separate_from_training(loader: object, seed: int) -> None:
    """Give a loader without a generator one of its own.

    It draws a number whenever it starts, which a resumed run does once more: from the process-wide generator
    this would change all later random numbers of the model.
    """
    if type(loader) is DataLoader and loader.generator is None:
        loader.generator = torch.Generator().manual_seed(seed)


_NUM_ROUNDS = 8
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd: any multiplier with many alternating bits


@final
class KeyedPermutation:
    """Permutation of the numbers below a length, chosen by a key.

    It is the same on all machines and in all versions: checkpoints depend on it.

    A Feistel network permutes the next power of two. Results that are too large are permuted again, until
    they are not.

    Source: M. Luby and C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions",
        1988; J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle walking).
    """

    def __init__(self, length: int, key: bytes) -> None:
        self._length = length
        num_bits = max(1, (length - 1).bit_length())
        self._low_bits = num_bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (num_bits - self._low_bits)) - 1
        digest = hashlib.blake2b(key, digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = struct.unpack(f"<{_NUM_ROUNDS}q", digest)

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the images of numbers below the length."""
        images = self._encrypt(numbers)
        while bool((large := images >= self._length).any()):
            images[large] = self._encrypt(images[large])
        return images

    def _encrypt(self, numbers: Tensor) -> Tensor:
        """Permute the numbers below the next power of two. Each round changes one half by the other."""
        high, low = numbers >> self._low_bits, numbers & self._low_mask
        for number in range(0, _NUM_ROUNDS, 2):
            high = _hash(low, self._keys[number], self._high_mask).bitwise_xor_(high)
            low = _hash(high, self._keys[number + 1], self._low_mask).bitwise_xor_(low)
        return (high << self._low_bits).bitwise_or_(low)


def _hash(half: Tensor, key: int, mask: int) -> Tensor:
    """Return well mixed bits of each number. Products are taken modulo 2**64."""
    mixed = (half ^ key).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 32).mul_(_SECOND)
    return mixed.bitwise_right_shift_(32).bitwise_and_(mask)


_BLOCK = 8192  # places whose samples are computed together, since a single one takes almost as long


@final
class GlobalBatches(Batches):
    """Global batches of shuffled samples. Yields lists of the indices of this rank.

    `DataLoader(data, batch_sampler=GlobalBatches(len(data), 64))` replaces `DataLoader(data, 64,
    shuffle=True)`. The order is a function of seed, epoch and place, so the state is one number and the
    skipped ranges, and the memory does not depend on the number of samples.

    Args:
        num_samples: number of samples of the data.
        batch_size: samples of all ranks in one optimizer step.
        shuffle: another random order in each epoch; otherwise the order of the data.
        **options: as for `Batches`: `seed`, `accumulation_steps`, `drop_last`, `rank`, `world_size`.

    Raises:
        InvalidInput: an argument is out of range, or there are fewer samples than ranks.
    """

    def __init__(self, num_samples: int, batch_size: int, *, shuffle: bool = True, **options: Any) -> None:
        super().__init__(batch_size, **options)
        self._check_samples(num_samples)
        self.num_samples, self.shuffle = num_samples, shuffle
        self._blocks: dict[tuple[int, int], list[int]] = {}  # of the order, by epoch and number; two

    @override
    def _count_units(self, epoch: int) -> int:
        return self.num_samples

    @override
    def _identity(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self.shuffle}

    @override
    def _units(self, epoch: int, offsets: Sequence[int]) -> list[int]:
        if not self.shuffle:
            return list(offsets)
        return [self._block(epoch, place // _BLOCK)[place % _BLOCK] for place in offsets]

    def _block(self, epoch: int, number: int) -> list[int]:
        def compute() -> list[int]:
            permute = KeyedPermutation(self.num_samples, f"{self.seed}/{epoch}".encode())
            return permute(torch.arange(start, min(start + _BLOCK, self.num_samples))).tolist()

        start = number * _BLOCK
        return keep_two(self._blocks, (epoch, number), compute)
