"""Tensors in memory that is mapped read-only: a restore that writes to them would kill the process."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping, Sequence

import torch

from holdfast.errors import InvalidInput
from holdfast.system.linux.memory_mappings import read_mappings

_ORIGIN = 'memory that is mapped read-only, such as that of np.load(mmap_mode="r")'
_MAX_NAMED = 5


def find_read_only(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors in memory that this process cannot write to.

    Blocks: 1 ms per 1000 mappings of the process.
    """
    if sys.platform != "linux":
        return []  # readers of checkpoints may run there
    ranges = [(start, stop) for start, stop, _ in read_mappings(lambda access: b"w" not in access)]
    stops = [stop for _, stop in ranges]
    found: list[str] = []
    for name, tensor in tensors.items():
        start, stop = _span(tensor)
        at = bisect.bisect_right(stops, start)
        if start < stop and at < len(ranges) and ranges[at][0] < stop:
            found.append(name)
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a CPU tensor's first byte and after its last; equal ones for others."""
    if tensor.device.type != "cpu" or not tensor.numel() or tensor.layout is not torch.strided:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def refuse_read_only(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if a restore would write to memory that is mapped read-only.

    Args:
        tensors: live tensors that are written to, by name.

    Raises:
        InvalidInput: there is one.
    """
    found = find_read_only(tensors)
    if found:
        raise InvalidInput(
            f"{_listed(found)} in {_ORIGIN}, so a restore cannot write to it. Nothing was changed. "
            "Put a copy into the state: tensor.clone(). Or leave it out with only=.",
            key=found[0],
        )


def describe_read_only(names: Sequence[str]) -> str:
    """Return a sentence about tensors in memory that is mapped read-only."""
    return (
        f"{_listed(names)} in {_ORIGIN}, so a restore would be refused. Put a copy into the state: "
        "tensor.clone()."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"
