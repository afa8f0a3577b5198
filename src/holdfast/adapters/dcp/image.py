"""Copy of the tensors of a DCP plan into an image of the data file."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from holdfast.checkpoint.format.layout import FileLayout, Shard
from holdfast.checkpoint.state.tensors import PLAIN
from holdfast.checkpoint.state.torch_dtypes import torch_dtype
from holdfast.errors import InvalidInput, Unsupported


@torch.no_grad()
def stage(planner: SavePlanner, items: Sequence[tuple[WriteItem, Shard]], layout: FileLayout) -> memoryview:
    """Copy tensors into a new buffer with the bytes of a data file.

    Each is resolved, copied and released in turn.

    Args:
        items: tensors to copy, in the order of the layout's starts.

    Raises:
        Unsupported: a tensor does not have plain memory.
        InvalidInput: a tensor differs from the plan.

    Blocks: until the tensors are copied, also from devices.
    """
    memory = mmap.mmap(-1, layout.file_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages, which halve the cost of new memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[: len(layout.header)] = layout.header
    image = torch.frombuffer(memory, dtype=torch.uint8)
    for (item, shard), start in zip(items, layout.starts, strict=True):
        source = _check(planner.resolve_data(item), shard)
        target = image[start : start + shard.num_bytes].view(torch_dtype(shard.dtype)).view(shard.sizes)
        target.copy_(source.detach())
    return memoryview(memory)


def _check(source: object, shard: Shard) -> torch.Tensor:
    name = shard.name
    if type(source) not in PLAIN or not isinstance(source, torch.Tensor):
        kind = type(source)
        raise Unsupported(
            f"{name} cannot be saved: it is a {kind.__module__}.{kind.__qualname__}, not a plain tensor.",
            key=name,
        )
    if source.layout is not torch.strided or source.is_meta:
        reason = "the meta device" if source.is_meta else f"layout {source.layout}"
        raise Unsupported(f"{name} cannot be saved: it does not have dense memory ({reason}).", key=name)
    if source.dtype is not torch_dtype(shard.dtype) or tuple(source.shape) != shard.sizes:
        raise InvalidInput(
            f"{name} was planned as {shard.dtype}{list(shard.sizes)} and is now "
            f"{source.dtype}{list(source.shape)}. It was changed during the save, which was cancelled.",
            key=name,
        )
    return source
