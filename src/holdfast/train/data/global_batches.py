"""Shuffled batches of any number of samples, whose order is computed instead of stored."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from holdfast.train.data.batches import Batches, keep_two

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
class GlobalBatches(Batches[int]):
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
