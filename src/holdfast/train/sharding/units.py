"""Turns the blocks of a model, and the model, into FSDP2 units: recomputed, compiled, prefetching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from holdfast.train.sharding.layout import Layout

_WRAPPED = "_checkpoint_wrapped_module."


@dataclass(frozen=True, slots=True)
class Knobs:
    """How units behave, checked.

    Args:
        keep: gathered parameters stay until backward has used them.
        dtype: in which forward and backward compute; None as the parameters are.
        offload: parameters, gradients and optimizer state live in host memory.
        recompute: blocks forget their activations and compute them again in backward.
        compile: each block is compiled by itself.
        prefetch: how many units ahead are gathered; 0 leaves it to FSDP.
    """

    keep: bool
    dtype: torch.dtype | None
    offload: bool
    recompute: bool
    compile: bool
    prefetch: int


def make_units(model: nn.Module, names: Sequence[str], layout: Layout, device: str, knobs: Knobs) -> None:
    """Shard the named modules and then the model, in place.

    Args:
        model: not sharded yet.
        names: of its blocks, inner ones before outer ones.
        layout: which ranks share a copy.
        device: type of the device to compute on.
        knobs: how the units behave.

    Ranks: collective.
    """
    blocks = [model.get_submodule(name) for name in names]
    if knobs.recompute:  # inside of the unit: what is computed again finds its parameters gathered
        blocks = _recomputed(model, blocks)
    mesh = init_device_mesh(device, layout.mesh_shape, mesh_dim_names=layout.mesh_names)
    offload = CPUOffloadPolicy(pin_memory=device != "cpu") if knobs.offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(knobs.dtype, torch.float32 if knobs.dtype is not None else None)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    for block in blocks:
        if knobs.compile:
            block.compile()  # each by itself: the hooks of the units stay outside, so no graph breaks
        fully_shard(block, reshard_after_forward=not knobs.keep, **options)
    # The backward pass begins where the forward pass ended: to free the root in between would be for nothing.
    fully_shard(model, reshard_after_forward=False, **options)
    if knobs.prefetch:
        _prefetch(model, blocks, knobs.prefetch)


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers of recomputed modules."""
    return name.replace(_WRAPPED, "")


def _recomputed(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Wrap modules, wherever they stand in the model, so that backward computes their activations again."""
    wrappers: dict[int, nn.Module] = {}
    for block in blocks:
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is block:
                    parent._modules[name] = wrappers.setdefault(id(block), checkpoint_wrapper(block))
    return [wrappers[id(block)] for block in blocks]


def _prefetch(model: Any, blocks: Sequence[Any], ahead: int) -> None:
    """Let each unit gather those that come after it, and in backward those before it.

    Source: torchtitan's `apply_fsdp`; units are taken to run in the model's order.
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
