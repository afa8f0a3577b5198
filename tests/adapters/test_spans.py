"""Regions of saved tensors: the spans that are read, and the values, for any shapes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.dcp.reader import Span, make_sinks, spans
from holdfast.checkpoint.format.layout import Shard
from holdfast.errors import InvalidInput

Region = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Draw a shape, and offsets and sizes of a non-empty region in it."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return tuple(shape), tuple(offsets), tuple(sizes)


def view_of(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]


@given(regions(), st.integers(0, 60), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_the_region_is_read_into_the_target(
    region: Region, max_gap: int, step: int, dtype: torch.dtype
) -> None:
    """This holds for views of any length, dense and transposed targets, and any dtype."""
    shape, offsets, sizes = region
    source = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    shard = Shard.whole("x", "F32", shape)
    content = bytearray(source.contiguous().numpy().tobytes())
    for target in (
        torch.full(sizes, -1, dtype=dtype),
        torch.full(sizes[::-1], -1, dtype=dtype).permute(tuple(reversed(range(len(sizes))))),
    ):
        for at, num_bytes, sink in make_sinks(shard, offsets, sizes, target, max_gap_bytes=max_gap):
            for start in range(0, num_bytes, step):
                stop = min(start + step, num_bytes)
                sink.write(start, memoryview(content)[at + start : at + stop])
        assert torch.equal(target, view_of(source, offsets, sizes).to(dtype))


@given(regions(), st.integers(0, 60))
def test_nothing_is_read_twice_and_large_gaps_are_skipped(region: Region, max_gap: int) -> None:
    shape, offsets, sizes = region
    wanted = view_of(torch.arange(math.prod(shape)).reshape(shape), offsets, sizes).flatten().tolist()
    found = list(spans(shape, offsets, sizes, max_gap))
    stretches = sorted((one.start, one.start + one.num_items) for one in found)
    for (_, stop), (start, _) in itertools.pairwise(stretches):
        assert stop <= start
    read = {item for start, stop in stretches for item in range(start, stop)}
    assert read >= set(wanted)
    gaps = [b - a - 1 for a, b in itertools.pairwise(wanted)]
    along = sum(gap for gap in gaps if gap <= max_gap)
    assert len(read) <= len(wanted) + along


def test_columns_are_one_span_for_small_rows_and_several_for_large_rows() -> None:
    assert list(spans((4, 10), (1, 2), (2, 3), max_gap=7)) == [Span(12, 13, (0, 0), (2, 3))]
    assert [one.start for one in spans((4, 10), (1, 2), (2, 3), max_gap=6)] == [12, 22]


def test_a_target_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"x has shape \[2\], but the tensor to load it into has \[3\]"):
        next(make_sinks(Shard.whole("x", "F32", (4,)), (0,), (2,), torch.zeros(3), max_gap_bytes=0))
