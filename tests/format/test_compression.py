"""Compressed form of data files: every file comes back, and damage is an error or changes its hash."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import compression
from holdfast.checkpoint.format.compression import (
    CompressedBlock,
    compress,
    decompress,
    index_bytes,
    read_index,
)
from holdfast.errors import Corrupt

FILES = st.one_of(
    st.binary(max_size=300),
    st.tuples(st.integers(0, 2**32), st.integers(0, 5000), st.sampled_from(["f4", "f2", "i8", "u1"])).map(
        lambda found: _numbers(*found)
    ),
)


def _numbers(seed: int, count: int, dtype: str) -> bytes:
    return np.random.default_rng(seed).normal(0, 20, count).astype(dtype, casting="unsafe").tobytes()


def _pairs(data: bytes, base: bytes | None, size: int) -> list[tuple[memoryview, memoryview | None]]:
    return [
        (memoryview(data)[at : at + size], None if base is None else memoryview(base)[at : at + size])
        for at in range(0, len(data), size)
    ]


def _read(whole: bytes, plain_bytes: int, base: bytes | None, size: int) -> bytes:
    index = bytearray(whole[len(whole) - index_bytes(plain_bytes) :])
    found = b""
    for number, block in enumerate(read_index(index, plain_bytes, len(whole), "a")):
        at = number * size
        old = memoryview(base or b"")[at : at + size] if block.needs_base else None
        data = memoryview(whole)[block.start : block.start + block.num_bytes]
        found += decompress(data, block, min(size, plain_bytes - at), old, "a")
    return found


@given(FILES, st.one_of(st.none(), FILES, st.just(b"same")), st.integers(0, 2**32))
def test_a_file_comes_back_with_and_without_a_base(data: bytes, base: bytes | None, seed: int) -> None:
    if base == b"same":  # the file, with some bytes changed
        changed = bytearray(data)
        for at in random.Random(seed).sample(range(len(data)), len(data) // 10):
            changed[at] ^= 1
        base = bytes(changed)
    size = 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "BLOCK_BYTES", size)
        whole = b"".join(compress(_pairs(data, base, size)))
        assert len(whole) <= len(data) + index_bytes(len(data))  # no block grows
        assert _read(whole, len(data), base, size) == data


@given(FILES.filter(bool), st.data())
def test_damage_raises_corrupt_or_changes_bytes_of_the_same_length(data: bytes, draw: st.DataObject) -> None:
    size = 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "BLOCK_BYTES", size)
        base = bytes(reversed(data))
        damaged = bytearray(b"".join(compress(_pairs(data, base, size))))
        for _ in range(draw.draw(st.integers(1, 3))):
            damaged[draw.draw(st.integers(0, len(damaged) - 1))] ^= draw.draw(st.integers(1, 255))
        try:
            found = _read(bytes(damaged), len(data), base, size)
        except Corrupt:
            return
        assert len(found) == len(data)


def test_weights_near_their_base_take_less_than_planes_and_those_less_than_plain() -> None:
    old = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype("f4")
    new = (old * (1 + np.random.default_rng(1).normal(0, 1e-4, 1 << 20))).astype("f4")
    pairs = [(memoryview(new.tobytes()), memoryview(old.tobytes()))]
    alone = sum(map(len, compress([(pairs[0][0], None)])))
    near = sum(map(len, compress(pairs)))
    assert near < 0.9 * alone < 0.9 * new.nbytes


def test_a_frame_that_announces_a_huge_size_is_refused_before_memory_is_taken() -> None:
    huge = compression.zstandard.ZstdCompressor().compress(bytes(100 << 20))  # 10 kB that announce 100 MB
    with pytest.raises(Corrupt, match="another size"):
        decompress(memoryview(huge), CompressedBlock(0, len(huge), 4), 1000, None, "a")


@pytest.mark.parametrize("index", [b"\xff\xff\xff\xff\x01", b"\x01\x00\x00\x00\x03", b"\x01\x00\x00\x00\x04"])
def test_an_index_that_does_not_describe_its_object_is_refused(index: bytes) -> None:
    with pytest.raises(Corrupt):
        read_index(bytearray(index), 1000, 1000, "a")
