"""What there is to shard over: the ranks, their device and their backend; alone, a group of one is made."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from holdfast.errors import InvalidInput, Unsupported


@dataclass(frozen=True, slots=True)
class World:
    """The process group as one of its ranks sees it.

    Args:
        rank: this rank's number.
        num_ranks: of the group.
        device: type of the device that parameters are computed on, such as "cpu" or "cuda".
        backend: what carries tensors of that device, such as "gloo" or "nccl".
    """

    rank: int
    num_ranks: int
    device: str
    backend: str


def enter(device: str | None) -> World:
    """Look at the process group; in a single process that has none, make a group of one.

    Args:
        device: type of the device that is wanted; default the accelerator if there is one.

    Raises:
        InvalidInput: other ranks were started but there is no group, or it cannot carry tensors of the
            device.
        Unsupported: the installed torch cannot compute sharded models on that device.

    Ranks: not collective.
    """
    accelerator = accelerator_type()
    if not dist.is_initialized():
        _make_group_of_one(accelerator if device is None else device)
    backends = backends_of(None)
    chosen = choose_device(device, accelerator, backends)
    _check_torch_shards_on(chosen)
    return World(dist.get_rank(), dist.get_world_size(), chosen, backends[chosen])


def _check_torch_shards_on(device: str) -> None:
    if device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise Unsupported(
            f"torch {torch.__version__} computes sharded models (FSDP2) on accelerators only. Install "
            "torch 2.7 or newer to shard on CPUs. Nothing was changed."
        )


def accelerator_type() -> str | None:
    """Type of this machine's accelerator; None if it has none."""
    if not torch.accelerator.is_available():  # without this torch 2.6 names what it was built for
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def choose_device(asked: str | None, accelerator: str | None, backends: Mapping[str, str]) -> str:
    """The type of device to compute on.

    Args:
        asked: what the caller wants, if anything.
        accelerator: what the machine has, if anything.
        backends: of the process group, by type of device.

    Raises:
        InvalidInput: there is no such device, or the group cannot carry its tensors.
    """
    if asked not in (None, "cpu", accelerator):
        raise InvalidInput(
            f"device={asked!r} is asked for, but this machine has {accelerator or 'no accelerator'}. "
            f"Pass device={accelerator or 'cpu'!r}, or leave it out."
        )
    device = asked or accelerator or "cpu"
    if device != "cpu" and backends.get(device) == "gloo":
        # FSDP moves parameters to the accelerator and dies there without a message.
        raise InvalidInput(
            f"This machine has a {device} device, but the process group speaks gloo only, which cannot shard "
            "on it; nothing was changed. Call torch.distributed.init_process_group() without a backend to "
            "train on "
            f'{device}, or pass device="cpu" to train on the CPU.'
        )
    if device not in backends:
        spoken = ", ".join(f"{type_}:{name}" for type_, name in backends.items()) or "nothing"
        raise InvalidInput(
            f"The process group carries no tensors of {device} (it has {spoken}); nothing was changed. Call "
            "torch.distributed.init_process_group() without a backend: it then takes one for each device "
            "there is."
        )
    return device


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """What carries tensors in a process group, by type of device; None for the default group."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return {device: backend for device, _, backend in pairs}


def _make_group_of_one(device: str | None) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but there is no process group, so this rank would "
            "train alone. Call torch.distributed.init_process_group() before holdfast.shard()."
        )
    backend = "gloo" if device in (None, "cpu") else None  # None: one for each device there is
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
