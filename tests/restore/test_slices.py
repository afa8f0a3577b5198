"""Slices cover every tensor once, in order, and are read with bounded memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.layout import Region, item_offset
from holdfast.checkpoint.restore.slices import split_into_slices
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Corrupt
from making import flip, make_checkpoint, make_home, raw_bytes

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.integers(8, 400))
def test_slices_are_consecutive_and_cover_the_tensor(
    shape: tuple[int, ...], item_bytes: int, limit_bytes: int
) -> None:
    """Concatenated they are the tensor's elements in row-major order, none over the limit."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    found = []
    for region in split_into_slices(shape, item_bytes, limit_bytes):
        assert region.num_items * item_bytes <= limit_bytes
        found += numbers[region.slices].flatten().tolist()
    assert found == list(range(math.prod(shape)))


@given(st.data())
def test_the_overlap_of_a_slice_and_a_region_is_contiguous_in_the_region(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    region = Region(
        starts, tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True))
    )
    numbers = torch.full(shape, -1)
    numbers[region.slices] = torch.arange(region.num_items).reshape(region.sizes)
    for one in split_into_slices(shape, 1, data.draw(st.integers(1, 50))):
        common = one.overlap(region)
        if common is None:
            continue
        first = item_offset(common, region)
        assert numbers[common.slices].flatten().tolist() == list(range(first, first + common.num_items))


@pytest.mark.parametrize("frozen", [(), ("w",), ("bias", "none")])
@pytest.mark.parametrize("slice_bytes", [8, 100, 1 << 20])
def test_split_tied_frozen_and_per_rank_tensors_come_in_order(
    slice_bytes: int, frozen: tuple[str, ...]
) -> None:
    store = MemoryStore()
    make_home(store)
    whole, bias = torch.randn(6, 10), torch.randn(9).bfloat16()
    ranks = [
        {"w": (whole[:, :4], (0, 0), (6, 10)), "bias": bias, "rng": torch.ones(3), "none": torch.ones(0, 2)},
        {"w": (whole[:, 4:], (0, 4), (6, 10)), "rng": torch.zeros(3)},
    ]
    make_checkpoint(store, 1, 1, ranks, per_rank=["rng"], tied={"head": "w"}, frozen=frozen)
    checkpoint = holdfast.open(store)
    for keys, expected in (
        (["rng", "head", "none"], {"rng": torch.zeros(3), "w": whole}),
        (None, {"w": whole, "bias": bias, "rng": torch.zeros(3)}),
    ):
        found: dict[str, bytes] = {}
        for one in checkpoint.slices(keys, rank=1, slice_bytes=slice_bytes):
            assert one.start == len(found.get(one.name, b""))
            found[one.name] = found.get(one.name, b"") + bytes(one.view)
        assert found == {name: raw_bytes(tensor) for name, tensor in expected.items()}
        assert list(found) == list(expected)


def test_damage_is_found_before_the_slice_is_returned(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    make_home(store)
    make_checkpoint(
        store, 1, 1, [{"a": torch.zeros(1 << 15), "b": torch.zeros(1 << 15)}], chunk_bytes=1 << 16
    )
    flip(store, names.data(1, 1, 0))
    seen = []
    with pytest.raises(Corrupt, match="b"):
        seen += [one.name for one in holdfast.open(store).slices(slice_bytes=1 << 16)]
    checkpoint = holdfast.open(store)
    assert [one.name for one in checkpoint.slices(["a"], slice_bytes=1 << 16)] == ["a", "a"]
