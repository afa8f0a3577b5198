"""Persist: put a staged file image into a store, hashing it in the same pass over memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from holdfast.format.hashes import chunk_bytes_for, hash_chunks
from holdfast.format.part import DataFile
from holdfast.keeper import rate
from holdfast.store import Store


def persist(store: Store, name: str, image: memoryview, *, bytes_per_s: float | None = None) -> DataFile:
    """Put `image` under `name`, durably, and return its size and chunk hashes.

    The hashes are of the memory that was staged, not of what the store made of it: what the store spoils
    on the way does not match them.

    Args:
        store: where.
        name: of the data file.
        image: the file.
        bytes_per_s: that may be sent there; None for no limit.

    Raises:
        RetryLater: the store failed.

    Blocks: until the bytes are durable.
    """
    chunk_bytes = chunk_bytes_for(len(image))
    # Beside the write: xxh3 and write both leave the interpreter lock alone.
    with ThreadPoolExecutor(1, "holdfast-hash") as beside:
        chunks = beside.submit(hash_chunks, image, chunk_bytes)
        rate.put(store, name, image, bytes_per_s)
        return DataFile(len(image), chunk_bytes, chunks.result())
