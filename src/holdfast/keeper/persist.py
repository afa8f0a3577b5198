"""Persist: put a staged file image into a store, hashing it in the same pass over memory."""

from __future__ import annotations

import threading

from holdfast.format.hashes import chunk_bytes_for, chunk_ranges, digest
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
    hashing = _Hashing(image)
    thread = threading.Thread(target=hashing.run, name="holdfast-hash")
    thread.start()
    try:
        store.put(name, image)
    finally:
        thread.join()
    return DataFile(len(image), hashing.chunk_bytes, tuple(hashing.chunks))


class _Hashing:
    """Hashes an image beside its write; xxh3 and write both leave the interpreter lock alone."""

    def __init__(self, image: memoryview) -> None:
        self.image = image
        self.chunk_bytes = chunk_bytes_for(len(image))
        self.chunks: list[str] = []

    def run(self) -> None:
        for start, stop in chunk_ranges(len(self.image), self.chunk_bytes):
            self.chunks.append(digest(self.image[start:stop]))
