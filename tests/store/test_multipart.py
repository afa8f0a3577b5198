"""Splitting of streams into the parts of an upload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.store.bucket import MultipartBody
from holdfast.errors import InvalidInput


@given(st.lists(st.binary(max_size=30), max_size=10), st.integers(1, 40))
def test_segments_have_equal_length_and_the_same_bytes(parts: list[bytes], length: int) -> None:
    whole = b"".join(parts)
    room = bytearray(30)

    def reused() -> object:
        for part in parts:
            room[: len(part)] = part
            yield memoryview(room)[: len(part)]

    found = list(MultipartBody("a", reused(), len(whole), length))  # type: ignore[arg-type]
    assert b"".join(found) == whole
    assert all(len(one) == length for one in found[:-1])
    assert all(found)


@given(st.lists(st.binary(max_size=30), max_size=5), st.integers(0, 100))
def test_a_wrong_total_length_is_refused(parts: list[bytes], num_bytes: int) -> None:
    if sum(map(len, parts)) == num_bytes:
        return
    source = MultipartBody("a", parts, num_bytes, 10)
    with pytest.raises(InvalidInput) as caught:
        list(source)
    assert source.error is caught.value
