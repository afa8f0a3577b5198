"""Memory budget of one process's saves: its share of NEBULA_MEMORY_BUFFER_SIZE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from holdfast.errors import InvalidInput
from holdfast.system.units import format_bytes, parse_bytes

VARIABLE = "NEBULA_MEMORY_BUFFER_SIZE"
_MIN_BYTES = 64 << 20
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory limit of one process, and its origin.

    If a limit is set, several processes on the node share one half of it, and a single one has all of it.
    Without a limit, they share half of the free memory.
    """

    cap_bytes: int
    num_processes: int
    is_set: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], available_bytes: int) -> MemoryBudget:
        """Return the budget from the environment.

        Raises:
            InvalidInput: a variable has an invalid value.
        """
        processes = environ.get("LOCAL_WORLD_SIZE", "1")
        if not processes.isdecimal() or int(processes) < 1:
            raise InvalidInput(f"LOCAL_WORLD_SIZE must be a number of processes, not {processes!r}.")
        count, limit = int(processes), environ.get(VARIABLE)
        if not limit:
            return cls(max(available_bytes // 2 // count, _MIN_BYTES), count, is_set=False)
        num_bytes = parse_bytes(int(limit) if limit.isdecimal() else limit, VARIABLE)
        return cls(num_bytes if count == 1 else num_bytes // 2 // count, count, is_set=True)

    def check(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        """Check that the budget is large enough for some tensors.

        Raises:
            InvalidInput: the budget is too small. The message has the value that suffices.
        """
        needed = image_bytes(tensors)
        if needed <= self.cap_bytes:
            return
        share = 1 if self.num_processes == 1 else 2 * self.num_processes
        split = "" if share == 1 else f" (half of {VARIABLE}, divided by {self.num_processes} processes)"
        found = (
            f"{VARIABLE} leaves"
            if self.is_set
            else f"half of the free memory, as {VARIABLE} is not set, leaves"
        )
        raise InvalidInput(
            f"The checkpoint {tag!r} needs {needed} bytes of memory in this process, but {found} "
            f"{self.cap_bytes} ({format_bytes(self.cap_bytes)}){split}. Nothing was saved. Set {VARIABLE} to "
            f"at least {needed * share}; with twice that, a save can begin while the previous one is "
            "being written."
        )


def image_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of a file image with these tensors, rounded up: header, data and padding."""
    sizes = [tensor.nbytes + 512 for tensor in tensors]
    return -(-(sum(sizes) + 4 * _BLOCK_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
