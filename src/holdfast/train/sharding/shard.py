"""`shard`: shards a model across ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from holdfast.errors import Internal, InvalidInput, Unsupported
from holdfast.system.log import get_logger
from holdfast.train.sharding.blocks import Blocks, WrapPolicy, find_blocks
from holdfast.train.sharding.inspection import describe
from holdfast.train.sharding.process_group import ensure_process_group, make_mesh_layout
from holdfast.train.sharding.weights import (
    WeightsLike,
    broadcast_weights,
    choose_source,
    digest_model,
    materialize,
)


def _make_units(
    model: nn.Module,
    names: Sequence[str],
    *,
    activation_checkpointing: bool,
    compile: bool,
    prefetch: int,
    reshard_after_forward: bool,
    **policies: Any,
) -> None:
    """Shard the named modules, inner ones before outer ones, and then the model, in place."""
    blocks = [model.get_submodule(name) for name in names]
    if activation_checkpointing:  # inside the unit, so that recomputation has gathered parameters
        blocks = _with_checkpointing(model, blocks)
    for block in blocks:
        if compile:
            block.compile()  # separately: the hooks of the units stay outside and cause no graph breaks
        fully_shard(block, reshard_after_forward=reshard_after_forward, **policies)
    # The backward pass starts right after the forward pass, so freeing the root in between would be wasted.
    fully_shard(model, reshard_after_forward=False, **policies)
    if prefetch:
        _prefetch(model, blocks, prefetch)


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
    inner = {id(part) for block in blocks for part in block.modules() if part is not block}
    units = [block for block in blocks if id(block) not in inner]
    for order, kind in (([model, *units], "forward"), ([model, *reversed(units)], "backward")):
        for i, unit in enumerate(order):
            if coming := order[i + 1 : i + 1 + ahead]:
                getattr(unit, f"set_modules_to_{kind}_prefetch")(coming)


_log = get_logger("train")

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)
_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def shard(
    model: _ModuleT,
    shards: int | Literal["all"] = "all",
    *,
    reshard_after_forward: bool = True,
    dtype: str | torch.dtype | None = None,
    cpu_offload: bool = False,
    activation_checkpointing: bool = False,
    compile: bool = False,
    prefetch: int = 0,
    wrap: WrapPolicy | None = None,
    weights: WeightsLike | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> _ModuleT:
    """Shard a model across ranks, in place, and print how. Create the optimizer afterwards.

    Blocks of the model become FSDP2 units (`fully_shard`): the parameters of a unit are gathered before its
    forward and backward pass and freed afterwards, and its gradients are averaged over the ranks. Parameters
    outside of blocks belong to the unit of the whole model.

    Args:
        model: the same on every rank, with parameters on the CPU, on the device, or on meta.
        shards: number of ranks that share one copy of parameters, gradients and optimizer state. 1 gives
            every rank its own copy (DDP), "all" shares one copy (ZeRO-3), and a divisor of the number of
            ranks shares each copy among neighbours (hybrid).
        reshard_after_forward: free gathered parameters after the forward pass (FULL_SHARD, ZeRO-3). False
            keeps them until the backward pass (SHARD_GRAD_OP, ZeRO-2): less traffic, more memory.
        dtype: dtype of forward and backward, such as "bf16". Gradients are averaged in float32, and the
            optimizer updates the parameters in their own dtype. "fp16" needs a `torch.amp.GradScaler`.
        cpu_offload: keep parameters, gradients and optimizer state in host memory, and run the optimizer
            there.
        activation_checkpointing: discard the activations of each block and recompute them in backward.
        compile: compile each block separately.
        prefetch: number of units to gather ahead, in forward and backward, in the model's order. 0 leaves it
            to FSDP.
        wrap: the modules to use as blocks instead of those found automatically: classes or their names,
            module names or patterns ("encoder.block.*"), modules, a minimum number of parameters, or []
            for no blocks.
        weights: source of the parameters: a state dict on rank 0, a checkpoint, or the home of a run.
            Default: the model's own. Ranks whose model differs or is on meta receive rank 0's.
        device: device type to compute on. Default: the accelerator, or "cpu" without one.
        quiet: print nothing.

    Returns:
        The same model.

    Raises:
        InvalidInput: an argument does not fit the ranks, the device or the model; the model is on meta and
            `weights` is missing; or there are several ranks but no process group. Nothing was changed.
        NotFound: `weights` has no checkpoint, or one of another model.
        Unsupported: the model is already sharded or wrapped.
        HoldfastError: `weights` could not be read. The model is unusable.

    Ranks: collective; call it on every rank with the same arguments. Only rank 0's `weights` count. A single
        process needs no process group: it gets its own.
    Blocks: until all ranks have called it and have their weights.
    Source: FSDP2 is PyTorch's; the order of steps is torchtitan's; ZeRO is Rajbhandari et al. 2020, arXiv
        1910.02054.
    """
    computed = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and (not isinstance(computed, torch.dtype) or not computed.is_floating_point):
        raise InvalidInput(
            f"dtype must be one of {', '.join(_DTYPES)} or a floating-point torch dtype, got {dtype!r}."
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise InvalidInput(f"prefetch must be a number of units, at least 0, got {prefetch!r}.")
    _check_not_sharded(model)
    device = ensure_process_group(device)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layout = make_mesh_layout(shards, num_ranks)
    blocks = find_blocks(model, wrap)
    _check_dtypes(model, blocks)
    digest = digest_model(model)
    digests = [digest] * num_ranks
    if num_ranks > 1:
        dist.all_gather_object(digests, digest)
    source = choose_source(model, digests, weights, device, rank)
    _make_units(
        model,
        blocks.names,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
        mesh=init_device_mesh(device, layout.mesh_shape, mesh_dim_names=layout.mesh_names),
        mp_policy=MixedPrecisionPolicy(computed, None if computed is None else torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu") if cpu_offload else OffloadPolicy(),
    )
    if digest.on_meta:
        materialize(model, device, cpu_offload=cpu_offload)
    sent_bytes = 0 if source is None else broadcast_weights(model, source, device, rank)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Otherwise each rank would train its own, without a warning.
        if not isinstance(parameter, DTensor) or parameter.device_mesh.shape != layout.mesh_shape:
            raise Internal(f"{name} was not sharded over {layout.num_ranks} ranks.")
    if rank == 0 and not quiet:
        lines = [str(describe(model)), f"  blocks: {blocks.found}"]
        if left := ", ".join(blocks.left):
            lines.append(f"  in the unit of the whole model, due to shared parameters: {left}")
        if source is not None:
            lines.append(f"  loaded {source.description}, {sent_bytes:,} bytes sent")
        _log.info("\n".join(lines))
    return model


def _check_not_sharded(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"shard() takes a torch.nn.Module, got {type(model).__name__}.")
    wrappers = (FSDPModule, FullyShardedDataParallel, nn.parallel.DistributedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            raise Unsupported(
                f"{name or 'The model'} is already sharded or wrapped ({type(module).__name__}). Call "
                "shard() once, on the plain model. Nothing was changed."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise Unsupported(
                f"{name} is already a DTensor. For tensor parallelism with FSDP, call torch's fully_shard() "
                "with a mesh of both dimensions. Nothing was changed."
            )


def _check_dtypes(model: nn.Module, blocks: Blocks) -> None:
    """Check that each unit has one dtype. FSDP would fail only in the first forward pass."""
    taken: set[int] = set()
    for name in (*blocks.names, ""):
        own = [(n, p) for n, p in model.get_submodule(name).named_parameters() if id(p) not in taken]
        taken.update(id(p) for _, p in own)
        dtypes = {p.dtype: n for n, p in own if p.requires_grad}
        if len(dtypes) > 1:
            examples = ", ".join(f"{n} is {dtype}" for dtype, n in dtypes.items())
            raise InvalidInput(
                f"The parameters of a unit must have one dtype, but in {name or 'the whole model'} "
                f"{examples}. Convert the model to one dtype (dtype= sets the dtype of the computation), or "
                "put the others into their own unit with wrap=. Nothing was changed."
            )
