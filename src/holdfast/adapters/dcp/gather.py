"""Sinks that bring a region of a saved piece into a tensor of any dtype, device and strides."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch

from holdfast.adapters.dcp.spans import Span, spans, strides_of
from holdfast.errors import InvalidInput
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.layout import Piece
from holdfast.restore.fill import TensorSink
from holdfast.restore.read import Sink
from holdfast.state.tensors import torch_dtype


class GatherSink:
    """Collects a stretch of a piece, then copies the elements that are wanted from it into a tensor."""

    __slots__ = ("_dtype", "_left", "_lock", "_sink", "_span", "_stretch", "_strides", "_target")

    def __init__(
        self, span: Span, strides: tuple[int, ...], dtype: torch.dtype, target: torch.Tensor
    ) -> None:
        self._span = span
        self._strides = strides
        self._dtype = dtype
        self._target = target
        self._left = span.num_items * dtype.itemsize
        self._lock = threading.Lock()
        self._stretch: torch.Tensor | None = None
        self._sink: TensorSink | None = None

    def write(self, offset: int, view: memoryview) -> None:
        """Take bytes of the stretch; with the last ones, the wanted elements are copied."""
        with self._lock:
            if self._sink is None:  # not earlier: stretches come in turn, so few are in memory at once
                self._stretch = torch.empty(self._span.num_items, dtype=self._dtype)
                self._sink = TensorSink(self._stretch)
            sink = self._sink
        sink.write(offset, view)
        with self._lock:
            self._left -= len(view)
            if self._left:
                return
        assert self._stretch is not None
        with torch.no_grad():
            self._target.copy_(self._stretch.as_strided(self._span.lengths, self._strides))
        self._stretch = self._sink = None


def sinks(
    piece: Piece,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    target: torch.Tensor,
    *,
    max_gap_bytes: int,
) -> Iterator[tuple[int, int, Sink]]:
    """(byte in the piece, number of bytes, sink) of every stretch to be read for one region.

    Args:
        piece: what was saved.
        offsets: where the wanted region begins in the piece.
        lengths: of the region.
        target: gets the region; of its shape.
        max_gap_bytes: bytes that are better read along than passed over.

    Raises:
        InvalidInput: the target has another shape.
    """
    if tuple(target.shape) != lengths:
        message = f"{piece.name} is to be loaded as {list(lengths)} into a tensor of {list(target.shape)}."
        raise InvalidInput(message, key=piece.name)
    if not math.prod(lengths):
        return
    item_bytes, dtype = ITEM_BYTES[piece.dtype], torch_dtype(piece.dtype)
    strides = strides_of(piece.lengths)
    for span in spans(piece.lengths, offsets, lengths, max_gap_bytes // item_bytes):
        part = target
        for dim, (at, length) in enumerate(zip(span.at, span.lengths, strict=True)):
            part = part.narrow(dim, at, length)
        is_direct = span.is_dense and part.is_cpu and part.dtype is dtype and part.is_contiguous()
        sink = TensorSink(part) if is_direct else GatherSink(span, strides, dtype, part)
        yield span.start * item_bytes, span.num_items * item_bytes, sink
