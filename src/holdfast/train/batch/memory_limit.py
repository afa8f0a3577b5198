"""Memory limit of one rank: the free memory of its device, or its share of the host's."""

from __future__ import annotations

import torch

from holdfast.system import host_memory
from holdfast.system.environment import read_integer

# Probes do not show fragments that build up over hours, or other processes that grow a little.
_SHARE_OF_DEVICE = 0.97
_SHARE_OF_HOST = 0.9


def find_memory_limit(device: torch.device, used_bytes: int, *, num_sharing: int | None = None) -> int:
    """Return the bytes that this process may take on a device, including its current usage.

    On a GPU: the free memory, less 3 %. On a host: the memory that is available there or in the process's
    control group, whichever is less, divided by the ranks of this host, less 10 %.

    Args:
        used_bytes: bytes that the training state takes there now.
        num_sharing: ranks that share the host's memory. Default: LOCAL_WORLD_SIZE, as torchrun sets it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int((free + torch.cuda.memory_reserved(device)) * _SHARE_OF_DEVICE)
    sharing = num_sharing or read_integer("LOCAL_WORLD_SIZE", 1, minimum=1)
    return int(host_memory.available_bytes() / sharing * _SHARE_OF_HOST) + used_bytes
