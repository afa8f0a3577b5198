"""Persist: put a staged file image into a store, hashing it in the same pass over memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import Conflict, Corrupt, NotFound
from holdfast.format.hashes import chunk_bytes_for, digest, hash_chunks
from holdfast.format.part import DataFile
from holdfast.keeper import rate
from holdfast.store import Store


def persist(store: Store, name: str, image: memoryview, *, bytes_per_s: float | None = None) -> DataFile:
    """Put `image` under a new name, durably, and return its size and chunk hashes.

    The hashes are of the memory that was staged, not of what the store made of it: what the store spoils
    on the way does not match them. A file of the same bytes under that name, which a keeper before this one
    has put, is taken as it is.

    Args:
        store: where.
        name: of the data file.
        image: the file.
        bytes_per_s: that may be sent there; None for no limit.

    Raises:
        Conflict: other bytes have that name.
        RetryLater: the store failed.

    Blocks: until the bytes are durable.
    """
    chunk_bytes = chunk_bytes_for(len(image))
    # Beside the write: xxh3 and write both leave the interpreter lock alone.
    with ThreadPoolExecutor(1, "holdfast-hash") as beside:
        chunks = beside.submit(hash_chunks, image, chunk_bytes)
        try:
            rate.put(store, name, image, bytes_per_s)
        except Conflict:
            if not has_image(store, name, DataFile(len(image), chunk_bytes, chunks.result())):
                raise
        return DataFile(len(image), chunk_bytes, chunks.result())


def has_image(store: Store, name: str, file: DataFile) -> bool:
    """Return whether a store has a file of exactly these bytes under a name.

    Raises:
        RetryLater: the store failed.

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
    """The bytes of a data file, block by block in the same memory, each chunk checked against its hash.

    Raises:
        Corrupt: a chunk does not match its hash, or the file ends early.
        NotFound: no such file.
        RetryLater: the store failed.
    """
    room = memoryview(mmap.mmap(-1, rate.BLOCK_BYTES))  # page-aligned, as direct reads ask
    for start in range(0, file.num_bytes, rate.BLOCK_BYTES):
        block = room[: min(rate.BLOCK_BYTES, file.num_bytes - start)]
        store.read_into(name, start, block)
        for at in range(0, len(block), file.chunk_bytes):
            number = (start + at) // file.chunk_bytes
            found = digest(block[at : at + file.chunk_bytes])
            if found != file.hash_of(number):
                message = (
                    f"{name} in {store.url} is damaged in chunk {number}: expected "
                    f"xxh3:{file.hash_of(number)}, found xxh3:{found}. It was not sent to home."
                )
                raise Corrupt(message, key=name)
        yield block
