"""Process group to shard over: ranks, device, backend and mesh. A single process gets a group of one."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from msgspec import Struct
from torch._C._distributed_c10d import HashStore

from holdfast.errors import InvalidInput, Unsupported
from holdfast.system.environment import read_integer
from holdfast.system.units import plural


def ensure_process_group(device: str | None) -> str:
    """Return the device type to compute on. A single process without a process group gets a group of one."""
    accelerator = accelerator_type()
    if not dist.is_initialized():
        if (world_size := read_integer("WORLD_SIZE", 1, minimum=1)) > 1:
            raise InvalidInput(
                f"WORLD_SIZE is {world_size} but no process group exists, so this rank would "
                "train alone. Call torch.distributed.init_process_group() before holdfast.shard()."
            )
        backends = _backends_for(device or accelerator or "cpu")
        dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1)
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    chosen = choose_device(device, accelerator, backends_of(None))
    if chosen == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise Unsupported(
            f"torch {torch.__version__} supports sharded models (FSDP2) on accelerators only. Install "
            "torch 2.7 or newer to shard on CPUs. Nothing was changed."
        )
    return chosen


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerator, or None."""
    if not torch.accelerator.is_available():  # otherwise torch 2.6 returns the type it was built for
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def choose_device(requested: str | None, accelerator: str | None, backends: Mapping[str, str]) -> str:
    """Return the device type to compute on."""
    if requested not in (None, "cpu", accelerator):
        raise InvalidInput(
            f"device={requested!r} was requested, but this machine has {accelerator or 'no accelerator'}. "
            f"Pass device={accelerator or 'cpu'!r}, or omit it."
        )
    device = requested or accelerator or "cpu"
    if device != "cpu" and backends.get(device) == "gloo":
        # FSDP would move parameters to the accelerator and crash without a message.
        raise InvalidInput(
            f"This machine has a {device} device, but the process group has only the gloo backend, which "
            f"does not support sharding on it. Call {_init_call(device)} to train on {device}, or pass "
            'device="cpu" to train on the CPU. Nothing was changed.'
        )
    if device not in backends:
        supported = ", ".join(f"{type_}:{name}" for type_, name in backends.items()) or "nothing"
        raise InvalidInput(
            f"The process group does not support tensors on {device} (it has {supported}). Call "
            f"{_init_call(device)}. Nothing was changed."
        )
    return device


def _init_call(device: str) -> str:
    return f"torch.distributed.init_process_group({_backends_for(device)!r})"


def _backends_for(device: str) -> str:
    """Return the backends for tensors on the CPU and on a device, for `init_process_group`."""
    # Without an argument, torch 2.13 makes one for the accelerator alone.
    if device == "cpu":
        return "gloo"
    return f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of a process group by device type. None means the default group."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return {device: backend for device, _, backend in pairs}


class MeshLayout(Struct, frozen=True):
    """Groups of `shards` neighbouring ranks that share one copy of the parameters."""

    num_ranks: int  # ranks in the process group
    shards: int  # ranks that share one copy. Divides `num_ranks`

    @property
    def copies(self) -> int:
        """Number of copies of the parameters over all ranks."""
        return self.num_ranks // self.shards

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Shape of the device mesh: (copies, shards), or one dimension for a single copy."""
        return (self.num_ranks,) if self.copies == 1 else (self.copies, self.shards)

    @property
    def mesh_names(self) -> tuple[str, ...]:
        """Names of the mesh's dimensions."""
        return ("shard",) if self.copies == 1 else ("replicate", "shard")

    def describe(self, *, reshard_after_forward: bool) -> str:
        """Return a description with the common names, such as ZeRO-3."""
        if self.num_ranks == 1:
            return "on 1 rank, not sharded"
        if self.shards == 1:
            return f"replicated on {plural(self.num_ranks, 'rank')} (DDP)"
        stage = "ZeRO-3" if reshard_after_forward else "ZeRO-2"
        if self.copies == 1:
            return f"sharded over {plural(self.num_ranks, 'rank')} ({stage})"
        copies = f"{self.copies} copies, each sharded over {self.shards}"
        return f"on {plural(self.num_ranks, 'rank')}: {copies} (hybrid {stage})"


def make_mesh_layout(shards: int | Literal["all"], num_ranks: int) -> MeshLayout:
    """Return the layout for `shards` on a number of ranks."""
    if shards == "all":
        return MeshLayout(num_ranks, num_ranks)
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise InvalidInput(f"shards must be a number of ranks or 'all', got {shards!r}.")
    if shards < 1 or num_ranks % shards:
        fitting = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise InvalidInput(
            f"shards={shards} does not divide {plural(num_ranks, 'rank')} evenly. With this number of ranks, "
            f"shards may be {fitting}, or 'all'."
        )
    return MeshLayout(num_ranks, shards)
