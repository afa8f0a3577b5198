"""Chunks of a file."""

from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import hashes

sizes = st.integers(0, 1 << 45)


@given(sizes)
def test_chunk_sizes_stay_within_their_bounds(file_bytes: int) -> None:
    """A power of two, at most the stated number of chunks unless the largest chunk is reached."""
    chunk_bytes = hashes.chunk_bytes_for(file_bytes)
    assert hashes.MIN_CHUNK_BYTES <= chunk_bytes <= hashes.MAX_CHUNK_BYTES
    assert chunk_bytes & (chunk_bytes - 1) == 0
    assert chunk_bytes == hashes.MAX_CHUNK_BYTES or file_bytes <= chunk_bytes * hashes.CHUNKS_PER_FILE
    assert chunk_bytes == hashes.MIN_CHUNK_BYTES or file_bytes > chunk_bytes // 2 * hashes.CHUNKS_PER_FILE


@given(st.integers(0, 10_000), st.integers(1, 700))
def test_chunks_cover_the_file_in_order(file_bytes: int, chunk_bytes: int) -> None:
    """Without gap or overlap, all full but the last."""
    ranges = list(hashes.chunk_ranges(file_bytes, chunk_bytes))
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(file_bytes))
    assert all(stop - start == chunk_bytes for start, stop in ranges[:-1])
    assert all(stop > start for start, stop in ranges)


@given(st.integers(0, 3 * hashes.CACHED_BYTES), st.sampled_from([32 << 10, 96_000, 128 << 10, 1 << 20]))
def test_hashed_ranges_are_reported_in_order_whatever_the_chunks(file_bytes: int, chunk_bytes: int) -> None:
    """Small chunks together, as far as they fit into the cache, and never a part of a chunk."""
    data = memoryview(bytes(file_bytes))
    reported: list[tuple[int, int]] = []
    found = hashes.hash_chunks(
        data, chunk_bytes, on_hashed=lambda start, stop: reported.append((start, stop))
    )
    assert found == hashes.hash_chunks(data, chunk_bytes)
    assert [start for start, _ in reported] == [0, *(stop for _, stop in reported)][: len(reported)]
    assert file_bytes == (reported[-1][1] if reported else 0)
    assert all(start % chunk_bytes == 0 for start, _ in reported)
    assert all(stop - start <= max(hashes.CACHED_BYTES, chunk_bytes) for start, stop in reported)
    assert len(reported) == -(
        -file_bytes // max(hashes.CACHED_BYTES // chunk_bytes * chunk_bytes, chunk_bytes)
    )


@given(st.binary())
def test_a_digest_is_xxh3_128_for_any_buffer(data: bytes) -> None:
    expected = xxhash.xxh3_128(data).hexdigest()
    assert (
        hashes.digest(data) == hashes.digest(bytearray(data)) == hashes.digest(memoryview(data)) == expected
    )
    assert len(expected) == 32
