"""FSDP2 units made from the blocks of a model: activation checkpointing, compilation, prefetching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from holdfast.train.sharding.process_group import MeshLayout

_WRAPPED = "_checkpoint_wrapped_module."


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Options of all units, validated."""

    reshard_after_forward: bool
    dtype: torch.dtype | None
    cpu_offload: bool
    activation_checkpointing: bool
    compile: bool
    prefetch: int


def make_units(
    model: nn.Module, names: Sequence[str], layout: MeshLayout, device: str, options: UnitOptions
) -> None:
    """Shard the named modules and then the model, in place.

    Args:
        names: names of its blocks, inner ones before outer ones.

    Ranks: collective.
    """
    blocks = [model.get_submodule(name) for name in names]
    if options.activation_checkpointing:  # inside the unit, so that recomputation has gathered parameters
        blocks = _with_checkpointing(model, blocks)
    mesh = init_device_mesh(device, layout.mesh_shape, mesh_dim_names=layout.mesh_names)
    offload = CPUOffloadPolicy(pin_memory=device != "cpu") if options.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(options.dtype, torch.float32 if options.dtype is not None else None)
    policies: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    for block in blocks:
        if options.compile:
            block.compile()  # separately: the hooks of the units stay outside and cause no graph breaks
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **policies)
    # The backward pass starts right after the forward pass, so freeing the root in between would be wasted.
    fully_shard(model, reshard_after_forward=False, **policies)
    if options.prefetch:
        _prefetch(model, blocks, options.prefetch)


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers of activation checkpointing."""
    return name.replace(_WRAPPED, "")


def _with_checkpointing(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Wrap modules for activation checkpointing wherever they occur in the model, and return the wrappers."""
    wrappers: dict[int, nn.Module] = {}
    for block in blocks:
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is block:
                    parent._modules[name] = wrappers.setdefault(id(block), checkpoint_wrapper(block))
    return [wrappers[id(block)] for block in blocks]


def _prefetch(model: Any, blocks: Sequence[Any], ahead: int) -> None:
    """Let each unit gather the next `ahead` units. In backward, these are the previous ones.

    Source: torchtitan's `apply_fsdp`; assumes that units run in the model's order.
    """
    units = [
        block for block in blocks if not any(other is not block and _holds(other, block) for other in blocks)
    ]
    order = [model, *units]
    for i, unit in enumerate(order):
        if coming := order[i + 1 : i + 1 + ahead]:
            unit.set_modules_to_forward_prefetch(coming)
    order = [model, *reversed(units)]
    for i, unit in enumerate(order):
        if coming := order[i + 1 : i + 1 + ahead]:
            unit.set_modules_to_backward_prefetch(coming)


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())
