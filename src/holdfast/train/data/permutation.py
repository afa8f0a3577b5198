"""Permutation of any length that is computed per index from a key."""

from __future__ import annotations

import hashlib
import struct
from typing import final

from torch import Tensor

_NUM_ROUNDS = 8
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd: any multiplier with many alternating bits


@final
class KeyedPermutation:
    """Permutation of the numbers below a length, chosen by a key.

    It is the same on all machines and in all versions: checkpoints depend on it.

    A Feistel network permutes the next power of two. Results that are too large are permuted again, until
    they are not.

    Args:
        length: number of elements, from 1 to 2**62.
        key: any bytes.

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
        """Return the images of numbers below the length.

        Args:
            numbers: int64, of any shape.
        """
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
