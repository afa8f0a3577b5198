"""How much memory a training may take: of the device, of this machine, or of the control group it runs in."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# What probes do not show: fragments that build up over hours, and other processes that want a little more.
_SHARE_OF_DEVICE = 0.97
_SHARE_OF_HOST = 0.9


def find_limit(device: torch.device, held_bytes: int, *, num_sharing: int | None = None) -> int:
    """Bytes that this process may take on a device, with what it holds there now.

    A device's free memory, less 3 %. Of a host: what is available there or in the process's control group,
    whichever is less, divided by the ranks of this host, less 10 %.

    Args:
        device: where the model lies.
        held_bytes: what the state takes there now.
        num_sharing: ranks that share the host's memory; by default LOCAL_WORLD_SIZE, as torchrun sets it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int((free + torch.cuda.memory_reserved(device)) * _SHARE_OF_DEVICE)
    sharing = num_sharing or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(free_host_bytes() / sharing * _SHARE_OF_HOST) + held_bytes


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that a process may still take of this machine's memory.

    Args:
        root: where `proc` and `sys` are.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return min([int(available.split()[1]) * 1024, *_free_in_groups(root)])


def _free_in_groups(root: Path) -> list[int]:
    """What the limits of this process's control groups leave, its own and those around it."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inside = top / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if (free := _free_in_group(folder)) is not None:
                found.append(free)
            if folder == top:
                break
    return found


def _free_in_group(folder: Path) -> int | None:
    """What is left of one group's limit; None if it has none. Cached files that can go count as free."""
    for most, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (folder / most).exists():
            continue
        limit = (folder / most).read_text().strip()
        if limit == "max":
            return None
        lines = (folder / "memory.stat").read_text().splitlines()
        reclaimable = next((int(line.split()[1]) for line in lines if line.split()[0] == cached), 0)
        return max(0, int(limit) - int((folder / used).read_text()) + reclaimable)
    return None
