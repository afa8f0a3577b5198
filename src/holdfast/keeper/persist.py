"""Persist: put a staged file image into a store, hashing it in the same pass over memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from holdfast.format.hashes import chunk_bytes_for, hash_chunks
from holdfast.format.part import DataFile
from holdfast.store import Store


def persist(store: Store, name: str, image: memoryview) -> DataFile:
    """Put `image` under `name`, durably, and return its size and chunk hashes.

    The hashes are of the memory that was staged, not of what the store made of it: what the store spoils
    on the way does not match them.

    Raises:
        RetryLater: the store failed.

    Blocks: until the bytes are durable.
    """
    chunk_bytes = chunk_bytes_for(len(image))
    # Beside the write: xxh3 and write both leave the interpreter lock alone.
    with ThreadPoolExecutor(1, "holdfast-hash") as beside:
        chunks = beside.submit(hash_chunks, image, chunk_bytes)
        store.put(name, image)
        return DataFile(len(image), chunk_bytes, chunks.result())
