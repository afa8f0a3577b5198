"""Sinks that read a region of a saved shard into a tensor of any kind."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from holdfast.adapters.dcp.spans import Span, spans, strides_of
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.restore.fill import CollectingSink, TensorSink
from holdfast.checkpoint.restore.read import Sink
from holdfast.checkpoint.state.torch_dtypes import torch_dtype
from holdfast.errors import InvalidInput


def make_sinks(
    shard: Shard,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    target: torch.Tensor,
    *,
    max_gap_bytes: int,
) -> Iterator[tuple[int, int, Sink]]:
    """Yield (byte in the shard, number of bytes, sink) for every span of a region.

    Args:
        target: tensor that receives the region, of the same shape.
        max_gap_bytes: maximum gap that is read rather than skipped.

    Raises:
        InvalidInput: the target has another shape.
    """
    if tuple(target.shape) != sizes:
        raise InvalidInput(
            f"{shard.name} has shape {list(sizes)}, but the tensor to load it into has {list(target.shape)}.",
            key=shard.name,
        )
    if not math.prod(sizes):
        return
    item_bytes, dtype = ITEM_BYTES[shard.dtype], torch_dtype(shard.dtype)
    strides = strides_of(shard.sizes)
    for span in spans(shard.sizes, offsets, sizes, max_gap_bytes // item_bytes):
        part = target
        for dim, (at, length) in enumerate(zip(span.at, span.sizes, strict=True)):
            part = part.narrow(dim, at, length)
        is_direct = span.is_dense and part.is_cpu and part.dtype is dtype and part.is_contiguous()
        sink = TensorSink(part) if is_direct else _gathering_sink(span, strides, dtype, part)
        yield span.start * item_bytes, span.num_items * item_bytes, sink


def _gathering_sink(
    span: Span, strides: tuple[int, ...], dtype: torch.dtype, target: torch.Tensor
) -> CollectingSink:
    """Return a sink that collects a span, then copies its wanted elements into a tensor."""

    def copy(items: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(items.as_strided(span.sizes, strides))

    return CollectingSink((span.num_items,), dtype, copy)
