"""Compressed data files of a bucket: every method shows the plain ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from holdfast.checkpoint.format.compression import BLOCK_BYTES, compress
from holdfast.checkpoint.format.names import CheckpointId, base, data
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.bucket import ObjectStore
from holdfast.errors import Conflict, Corrupt, NotFound

FIRST, SECOND = data(500, 3, 1), data(550, 3, 1)
FIRST_ID = CheckpointId(attempt=3, step=500)
OLD = base(1, 2, 7)  # of a rank that has gone, as has its attempt
BASE = base(500, 3, 1)


def _weights(seed: int, count: int = (2 * BLOCK_BYTES + 12) // 4) -> bytes:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype("f4").tobytes()


def _after(old: bytes) -> bytes:
    """Return the bytes of weights, as they are some steps later."""
    weights = np.frombuffer(old, "f4")
    return (weights * (1 + np.random.default_rng(9).normal(0, 1e-4, len(weights)))).astype("f4").tobytes()


def _put(
    store: ObjectStore, name: str, plain: bytes, checkpoint: CheckpointId | None = None, of_base: bytes = b""
) -> None:
    views = memoryview(plain), memoryview(of_base)
    pairs = [
        (views[0][at : at + BLOCK_BYTES], views[1][at : at + BLOCK_BYTES] if checkpoint else None)
        for at in range(0, len(plain), BLOCK_BYTES)
    ]
    store.put_compressed(name, checkpoint, compress(pairs), len(plain), if_absent=True)


@pytest.fixture
def store(home: Callable[..., str]) -> ObjectStore:
    found = open_store(home())
    assert isinstance(found, ObjectStore)
    return found


@pytest.fixture
def reader(store: ObjectStore) -> ObjectStore:
    """A store of the same place in another process, as far as it matters: it has listed nothing."""
    return ObjectStore(store.url)


@pytest.fixture
def plain(store: ObjectStore) -> bytes:
    """A base, and a file of differences to it, whose plain bytes are returned."""
    old = _weights(0)
    _put(store, FIRST, old)
    store.link(FIRST, BASE)
    new = _after(old)
    _put(store, SECOND, new, FIRST_ID, old)
    return new


def test_listing_size_and_reads_are_those_of_the_plain_file(
    store: ObjectStore, reader: ObjectStore, plain: bytes
) -> None:
    assert {entry.name: entry.num_bytes for entry in store.list()} == dict.fromkeys(
        (FIRST, SECOND, BASE), len(plain)
    )
    stored = {name: file.num_bytes for name, file in store._compressed.files.items()}
    assert stored[SECOND] < 0.9 * stored[FIRST] < 0.9 * len(plain)
    assert reader.size(SECOND) == len(plain)
    draw = random.Random(0)
    for _ in range(20):
        offset = draw.randrange(len(plain))
        buffer = bytearray(draw.randrange(min(len(plain) - offset, 3 << 20) + 1))
        reader.read_into(SECOND, offset, memoryview(buffer))
        assert buffer == plain[offset : offset + len(buffer)]
    assert ObjectStore(store.url).read_view(SECOND, 5, len(plain) - 5) == plain[5:]


def test_a_read_beyond_the_end_is_refused(reader: ObjectStore, plain: bytes) -> None:
    with pytest.raises(Corrupt, match="ends at byte"):
        reader.read_into(SECOND, len(plain) - 1, memoryview(bytearray(2)))


def test_a_name_in_use_is_taken_in_either_form(store: ObjectStore, reader: ObjectStore, plain: bytes) -> None:
    with pytest.raises(Conflict):
        _put(reader, SECOND, plain)
    store.put(data(600, 3, 1), b"plain")
    with pytest.raises(Conflict):
        _put(reader, data(600, 3, 1), plain)


def test_a_deleted_file_is_gone(store: ObjectStore, reader: ObjectStore, plain: bytes) -> None:
    del plain
    assert SECOND in {entry.name for entry in store.list()}
    store.delete(SECOND)
    assert reader.size(SECOND) is None
    with pytest.raises(NotFound):
        reader.read_into(SECOND, 0, memoryview(bytearray(1)))


def test_a_file_whose_base_is_gone_is_damaged(store: ObjectStore, reader: ObjectStore, plain: bytes) -> None:
    del plain
    list(store.list())
    store.delete(BASE)
    with pytest.raises(Corrupt, match="differences to bases/rank-00001-a0003-step-00000500"):
        reader.read_into(SECOND, 0, memoryview(bytearray(1)))


def test_a_shortened_object_is_damaged(store: ObjectStore, reader: ObjectStore, plain: bytes) -> None:
    del plain
    list(store.list())
    stored = store._compressed.files[SECOND]
    store.put(stored.stored, store.get(stored.stored)[:-1])
    with pytest.raises(Corrupt):
        reader.read_into(SECOND, 0, memoryview(bytearray(1)))


def test_bases_stay_while_a_file_or_a_keeper_needs_them(store: ObjectStore, plain: bytes) -> None:
    assert store.unused_bases(3) == []
    newer = base(600, 3, 1)
    store.put(newer, plain)
    store.put(OLD, plain)  # of a rank that has gone, as has its attempt
    assert store.unused_bases(3) == [OLD]
    store.delete(SECOND)
    assert sorted(store.unused_bases(3)) == sorted([BASE, OLD])
    assert newer in store.unused_bases(4)
