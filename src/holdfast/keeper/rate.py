"""Sends no more than so many bytes a second, so that saves leave room for what training itself reads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from holdfast.store import Store

BLOCK_BYTES = 8 << 20  # that are handed on at once


def put(store: Store, name: str, image: memoryview, bytes_per_s: float | None) -> None:
    """Put `image` under a new name, durably, within a rate; None for no limit.

    Raises:
        Conflict: the name exists.
        RetryLater: the store failed.

    Blocks: until the bytes are durable, and at least as long as they take at that rate.
    """
    if bytes_per_s is None:
        store.put(name, image, if_absent=True)
        return
    blocks = (image[start : start + BLOCK_BYTES] for start in range(0, len(image), BLOCK_BYTES))
    store.put_parts(name, paced(blocks, bytes_per_s), len(image), if_absent=True)


def paced(blocks: Iterable[memoryview], bytes_per_s: float) -> Iterator[memoryview]:
    """The same blocks, each handed on when all before it would have passed at this rate."""
    began, passed = time.monotonic(), 0
    for block in blocks:
        yield block
        passed += len(block)
        time.sleep(max(0.0, began + passed / bytes_per_s - time.monotonic()))
