"""Chunk hashes: xxh3-128 over fixed-size chunks of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import xxhash

MIN_CHUNK_BYTES = 32 << 10
MAX_CHUNK_BYTES = 8 << 20
CHUNKS_PER_FILE = 16384
"""At most about so many chunks a file: fine enough that a rank which reads parts of tensors wastes little."""

CACHED_BYTES = 512 << 10
"""Bytes that stay in the cache of a core, of its second or third level, until they are used again."""

DIGITS = 32  # length of a hash as text


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3-128 of `data` as 32 hex digits (big-endian canonical form).

    Blocks: for about 0.1 s per GB; releases the GIL for large inputs.
    Source: XXH3, Yann Collet, xxhash specification.
    """
    return xxhash.xxh3_128_hexdigest(data)


def short_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3-64 of `data` as 16 hex digits: enough to compare two copies, not to trust one."""
    return xxhash.xxh3_64_hexdigest(data)


def chunk_bytes_for(file_bytes: int) -> int:
    """Return the chunk size for a file, from 32 KiB to 8 MiB: at most 16384 chunks if possible."""
    size = MIN_CHUNK_BYTES
    while size < MAX_CHUNK_BYTES and size * CHUNKS_PER_FILE < file_bytes:
        size *= 2
    return size


def hash_chunks(
    data: memoryview, chunk_bytes: int, *, on_hashed: Callable[[int, int], None] | None = None
) -> str:
    """Return the hashes of all chunks of a file's bytes, in order, as one string.

    `on_hashed` is called with each range that was just hashed and is in the cache, in order and without gaps.

    Blocks: for about 0.1 s per GB; releases the GIL for large chunks.
    """
    if on_hashed is None:
        # Without bytecode between two hashes, other threads get the GIL more often than they wait for it.
        return "".join(
            map(digest, [data[start:stop] for start, stop in chunk_ranges(len(data), chunk_bytes)])
        )
    found: list[str] = []
    # Small chunks together: each call takes and releases the GIL, also for a range of one chunk.
    for start, stop in chunk_ranges(len(data), max(1, CACHED_BYTES // chunk_bytes) * chunk_bytes):
        found.append(hash_chunks(data[start:stop], chunk_bytes))
        on_hashed(start, stop)
    return "".join(found)


def chunk_ranges(file_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each chunk of a file, in order. The last one may be short."""
    for start in range(0, file_bytes, chunk_bytes):
        yield start, min(start + chunk_bytes, file_bytes)
