"""Rate limit of writes, which leaves bandwidth for the reads of training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from holdfast.checkpoint.store import Store

BLOCK_BYTES = 8 << 20
"""Bytes that are sent at once."""


def put(store: Store, name: str, image: memoryview, bytes_per_s: float | None) -> None:
    """Write an image under a new name, durably, within a rate; None for no limit.

    Blocks: until the bytes are durable, and at least as long as the rate requires.
    """
    if bytes_per_s is None:
        store.put(name, image, if_absent=True)
        return
    blocks = (image[start : start + BLOCK_BYTES] for start in range(0, len(image), BLOCK_BYTES))
    store.put_parts(name, paced(blocks, bytes_per_s), len(image), if_absent=True)


def paced(blocks: Iterable[memoryview], bytes_per_s: float) -> Iterator[memoryview]:
    """Yield blocks with pauses that keep them within a rate."""
    began, num_bytes = time.monotonic(), 0
    for block in blocks:
        yield block
        num_bytes += len(block)
        time.sleep(max(0.0, began + num_bytes / bytes_per_s - time.monotonic()))
