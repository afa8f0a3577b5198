"""Copies the tensors that a DCP plan names into one memory image of the rank's data file."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from holdfast.errors import InvalidInput, Unsupported
from holdfast.format.layout import FileLayout, Piece
from holdfast.state.tensors import PLAIN, torch_dtype


@torch.no_grad()
def stage(planner: SavePlanner, placed: Sequence[tuple[WriteItem, Piece]], layout: FileLayout) -> memoryview:
    """The bytes of a data file, in memory of their own; each tensor is resolved, copied and let go.

    Args:
        planner: gives the tensors.
        placed: what to write, in the order of the layout's starts.
        layout: where it stands.

    Raises:
        Unsupported: a tensor without plain memory.
        InvalidInput: a tensor that is not what the plan said.

    Blocks: until copied, also from devices.
    """
    memory = mmap.mmap(-1, layout.file_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages; with them new memory costs half
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[: len(layout.header)] = layout.header
    image = torch.frombuffer(memory, dtype=torch.uint8)
    for (item, piece), start in zip(placed, layout.starts, strict=True):
        source = _checked(planner.resolve_data(item), piece)
        target = image[start : start + piece.num_bytes].view(torch_dtype(piece.dtype)).view(piece.lengths)
        target.copy_(source.detach())
    return memoryview(memory)


def _checked(source: object, piece: Piece) -> torch.Tensor:
    name = piece.name
    if type(source) not in PLAIN or not isinstance(source, torch.Tensor):
        kind = type(source)
        message = f"{name} cannot be saved: it is a {kind.__module__}.{kind.__qualname__}, no plain tensor."
        raise Unsupported(message, key=name)
    if source.layout is not torch.strided or source.is_meta:
        where = "the meta device" if source.is_meta else f"layout {source.layout}"
        message = f"{name} cannot be saved: it has no dense memory ({where})."
        raise Unsupported(message, key=name)
    if source.dtype is not torch_dtype(piece.dtype) or tuple(source.shape) != piece.lengths:
        message = (
            f"{name} was planned as {piece.dtype}{list(piece.lengths)} and is now "
            f"{source.dtype}{list(source.shape)}. It was changed during the save, which was given up."
        )
        raise InvalidInput(message, key=name)
    return source
