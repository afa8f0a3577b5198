"""Persistence of a file image: written to a store, and hashed in the same pass over memory."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from holdfast.checkpoint.format.hashes import chunk_bytes_for, digest, hash_chunks
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.keeper import rate
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, NotFound


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
        bytes_per_s: limit on the rate; None for no limit.
        on_hashed: called with each range that was hashed, in order, by the thread that hashes.

    Blocks: until the bytes are durable.
    """
    chunk_bytes = chunk_bytes_for(len(image))
    with _hashing(image, chunk_bytes, on_hashed) as chunks:
        try:
            rate.put(store, name, image, bytes_per_s)
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
    """Return True if a store has a file of exactly these bytes under a name.

    Blocks: until the file is read.
    """
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
    buffer = memoryview(mmap.mmap(-1, rate.BLOCK_BYTES))  # page-aligned for direct reads
    for start in range(0, file.num_bytes, rate.BLOCK_BYTES):
        block = buffer[: min(rate.BLOCK_BYTES, file.num_bytes - start)]
        store.read_into(name, start, block)
        for at in range(0, len(block), file.chunk_bytes):
            number = (start + at) // file.chunk_bytes
            found = digest(block[at : at + file.chunk_bytes])
            if found != file.hash_of(number):
                raise Corrupt(
                    f"{name} in {store.url} is damaged in chunk {number}: expected "
                    f"xxh3:{file.hash_of(number)}, found xxh3:{found}. It was not copied.",
                    key=name,
                )
        yield block
