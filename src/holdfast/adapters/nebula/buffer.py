"""How much memory the saves of one process may take: its share of NEBULA_MEMORY_BUFFER_SIZE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from holdfast.errors import InvalidInput
from holdfast.units import format_bytes, parse_bytes

VARIABLE = "NEBULA_MEMORY_BUFFER_SIZE"
_LEAST_BYTES = 64 << 20
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Buffer:
    """The cap of one process, and where it comes from.

    Of a limit that is set, several processes on the node share one half; a single one has all of it. Without
    a limit they share half of what is free.
    """

    cap_bytes: int
    num_processes: int
    is_set: bool

    @classmethod
    def read(cls, environ: Mapping[str, str], available_bytes: int) -> Buffer:
        """The cap, from the environment.

        Raises:
            InvalidInput: a variable does not hold what it should.
        """
        processes = environ.get("LOCAL_WORLD_SIZE", "1")
        if not processes.isdecimal() or int(processes) < 1:
            raise InvalidInput(f"LOCAL_WORLD_SIZE must be a number of processes, got {processes!r}.")
        count, limit = int(processes), environ.get(VARIABLE)
        if not limit:
            return cls(max(available_bytes // 2 // count, _LEAST_BYTES), count, is_set=False)
        num_bytes = parse_bytes(int(limit) if limit.isdecimal() else limit, VARIABLE)
        return cls(num_bytes if count == 1 else num_bytes // 2 // count, count, is_set=True)

    def check(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        """Refuse what the cap has no room for.

        Raises:
            InvalidInput: says how many bytes the variable must hold.
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
        message = (
            f"The checkpoint {tag!r} needs {needed} bytes of memory in this process, but {found} "
            f"{self.cap_bytes} ({format_bytes(self.cap_bytes)}){split}. Nothing was saved. Set {VARIABLE} to "
            f"at least {needed * share}; twice that lets a save begin while the one before is still written."
        )
        raise InvalidInput(message)


def image_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a file image that holds these tensors, rounded up: header, data and padding."""
    sizes = [tensor.nbytes + 512 for tensor in tensors]
    return -(-(sum(sizes) + 4 * _BLOCK_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
