"""Persistence of a file image: written to a store within a rate, and hashed in the same pass over memory."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.checkpoint.format.hashes import chunk_bytes_for, digest, hash_chunks
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, NotFound

_Block = TypeVar("_Block", bytes, memoryview)
BLOCK_BYTES = 8 << 20
"""Bytes that are sent or read at once."""


def persist(
    store: Store,
    name: str,
    image: memoryview,
    *,
    bytes_per_s: float | None = None,
    on_hashed: Callable[[int, int], None] | None = None,
) -> DataFile:
    """Write an image to a store durably, and return its size and chunk hashes.

    The hashes are those of the staged memory, so bytes that the store damages do not match them. An existing
    file with the same bytes, which an earlier keeper has written, is accepted.

    Args:
        on_hashed: called with each range that was hashed, in order, by the thread that hashes.

    Blocks: until the bytes are durable.
    """
    chunk_bytes = chunk_bytes_for(len(image))
    with _hashing(image, chunk_bytes, on_hashed) as chunks:
        try:
            put(store, name, image, bytes_per_s)
        except Conflict:
            if not has_image(store, name, DataFile(len(image), chunk_bytes, chunks())):
                raise
        return DataFile(len(image), chunk_bytes, chunks())


@contextlib.contextmanager
def _hashing(
    image: memoryview, chunk_bytes: int, on_hashed: Callable[[int, int], None] | None
) -> Iterator[Callable[[], str]]:
    """Hash an image while the block runs, and yield a function that returns the hashes."""
    if len(image) <= chunk_bytes:  # to start a thread would take longer
        chunks = hash_chunks(image, chunk_bytes, on_hashed=on_hashed)
        yield lambda: chunks
        return
    # In another thread: both xxh3 and write release the interpreter lock.
    with ThreadPoolExecutor(1, "holdfast-hash") as hasher:
        yield hasher.submit(hash_chunks, image, chunk_bytes, on_hashed=on_hashed).result


def has_image(store: Store, name: str, file: DataFile) -> bool:
    """Return True if a store has a file of exactly these bytes under a name, which is read."""
    if store.size(name) != file.num_bytes:
        return False
    try:
        for _ in verified_blocks(store, name, file):
            pass
    except (Corrupt, NotFound):
        return False
    return True


def verified_blocks(store: Store, name: str, file: DataFile) -> Iterator[memoryview]:
    """Yield the verified blocks of a data file, each in the same memory."""
    buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # page-aligned for direct reads
    for start in range(0, file.num_bytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, file.num_bytes - start)]
        store.read_into(name, start, block)
        check_chunks(block, start, file, name, f"in {store.url}")
        yield block


def check_chunks(block: memoryview, start: int, file: DataFile, name: str, where: str) -> None:
    """Compare the chunks of a block, which begins at `start` of a file, with their hashes."""
    for at in range(0, len(block), file.chunk_bytes):
        number = (start + at) // file.chunk_bytes
        found = digest(block[at : at + file.chunk_bytes])
        if found != file.hash_of(number):
            raise Corrupt(
                f"{name} {where} is damaged in chunk {number}: expected xxh3:{file.hash_of(number)}, found "
                f"xxh3:{found}. It was not copied.",
                key=name,
            )


def describe_file(image: memoryview) -> DataFile:
    """Return the size and the chunk hashes of a file image."""
    chunk_bytes = chunk_bytes_for(len(image))
    return DataFile(len(image), chunk_bytes, hash_chunks(image, chunk_bytes))


def put(store: Store, name: str, image: memoryview, bytes_per_s: float | None) -> None:
    """Write an image under a new name, durably, within a rate; None for no limit.

    Blocks: until the bytes are durable, and at least as long as the rate requires.
    """
    if bytes_per_s is None:
        store.put(name, image, if_absent=True)
        return
    blocks = (image[start : start + BLOCK_BYTES] for start in range(0, len(image), BLOCK_BYTES))
    store.put_parts(name, paced(blocks, bytes_per_s), len(image), if_absent=True)


def paced(blocks: Iterable[_Block], bytes_per_s: float | None) -> Iterator[_Block]:
    """Yield blocks with pauses that keep them within a rate; None for no limit."""
    began, num_bytes = time.monotonic(), 0
    for block in blocks:
        yield block
        num_bytes += len(block)
        if bytes_per_s is not None:
            time.sleep(max(0.0, began + num_bytes / bytes_per_s - time.monotonic()))
