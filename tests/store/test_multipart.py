"""Splitting of streams into the parts of an upload."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.store.bucket import cut_segments
from holdfast.errors import InvalidInput


@given(st.lists(st.binary(max_size=30), max_size=10), st.integers(1, 40))
def test_segments_have_equal_length_and_the_same_bytes(parts: list[bytes], length: int) -> None:
    whole = b"".join(parts)
    room = bytearray(30)

    def reused() -> Iterator[memoryview]:
        for part in parts:
            room[: len(part)] = part
            yield memoryview(room)[: len(part)]

    found = list(cut_segments("a", reused(), len(whole), length))
    assert b"".join(found) == whole
    assert all(len(one) == length for one in found[:-1])
    assert all(found)


@given(st.lists(st.binary(max_size=30), max_size=5), st.integers(0, 100))
def test_a_wrong_total_length_is_refused(parts: list[bytes], num_bytes: int) -> None:
    if sum(map(len, parts)) == num_bytes:
        return
    with pytest.raises(InvalidInput):
        list(cut_segments("a", parts, num_bytes, 10))
