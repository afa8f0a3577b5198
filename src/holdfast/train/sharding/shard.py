"""`shard`: spreads a model over the ranks by FSDP2, in the one way that a few knobs name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from holdfast.errors import Internal, InvalidInput, Unsupported
from holdfast.train.sharding import weights as streaming
from holdfast.train.sharding import world as surroundings
from holdfast.train.sharding.blocks import Blocks, Where, find_blocks
from holdfast.train.sharding.layout import Layout, lay_out
from holdfast.train.sharding.reading import describe
from holdfast.train.sharding.units import Knobs, make_units
from holdfast.train.sharding.weights import WeightsLike

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
    keep: bool = False,
    dtype: str | torch.dtype | None = None,
    offload: bool = False,
    recompute: bool = False,
    compile: bool = False,
    prefetch: int = 0,
    at: Where | None = None,
    weights: WeightsLike | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> _ModuleT:
    """Spread a model over the ranks, in place, and say how. Make the optimizer after this.

    Blocks of the model become units of FSDP2 (`fully_shard`): a unit's parameters are gathered before its
    forward and backward pass and freed after it; its gradients are averaged over the ranks. What is in no
    block belongs to the unit of the whole model.

    Args:
        model: the same on every rank; its parameters on the CPU, on the device, or on meta.
        shards: how many ranks share one copy of parameters, gradients and optimizer state. 1: every rank has
            its own (DDP); "all": all share one (ZeRO-3); a number that divides the ranks: neighbours share
            one (hybrid).
        keep: gathered parameters stay until the backward pass has used them (SHARD_GRAD_OP, ZeRO-2): less
            traffic, more memory.
        dtype: what forward and backward compute in, such as "bf16"; gradients are averaged in float32, and
            the parameters that the optimizer sees stay as they are. "fp16" needs a `torch.amp.GradScaler`.
        offload: parameters, gradients and optimizer state live in host memory, and the optimizer runs there.
        recompute: blocks forget their activations, and backward computes them again (activation
            checkpointing).
        compile: compile every block by itself.
        prefetch: how many units ahead are gathered, forward and backward, in the model's order; 0 leaves it
            to FSDP.
        at: which modules are blocks, instead of those that are found: classes or their names, names of
            modules or patterns of them ("encoder.block.*"), modules, a least number of parameters, or [] for
            none.
        weights: where parameters come from: a state dict on rank 0, a checkpoint, or the home of a run. By
            default they are the model's own; ranks whose model differs from rank 0's, or is on meta, get rank
            0's.
        device: type of the device to compute on; default the accelerator, or "cpu" if there is none.
        quiet: do not print what was done.

    Returns:
        The same model.

    Raises:
        InvalidInput: an argument that does not fit the ranks, the device or the model; a model on meta
            without weights; ranks without a process group. Nothing was changed.
        NotFound: no checkpoint in `weights`, or it holds another model.
        Unsupported: a model that is sharded or wrapped already.
        HoldfastError: `weights` could not be read; the model cannot be used.

    Ranks: collective; every rank calls it with the same arguments, but for `weights`, where rank 0's count. A
        single process needs no process group: it gets one of its own.
    Blocks: until all ranks have called it and the weights are where they belong.
    Source: FSDP2 is PyTorch's; the order of steps is torchtitan's; ZeRO is Rajbhandari et al. 2020, arXiv
        1910.02054.
    """
    knobs = Knobs(keep, _read_dtype(dtype), offload, recompute, compile, _check_prefetch(prefetch))
    _check_fresh(model)
    world = surroundings.enter(device)
    layout = lay_out(shards, world.num_ranks)
    blocks = find_blocks(model, at)
    _check_dtypes(model, blocks)
    findings = streaming.look(model)
    every = [findings] * world.num_ranks
    if world.num_ranks > 1:
        dist.all_gather_object(every, findings)
    source = streaming.choose_source(model, every, weights, world.rank)
    make_units(model, blocks.names, layout, world.device, knobs)
    if findings.on_meta:
        streaming.materialize(model, world.device, offload=offload)
    sent = 0 if source is None else streaming.stream(model, source, world.device, world.rank)
    _check_done(model, layout)
    if world.rank == 0 and not quiet:
        _tell(model, blocks, source and f"filled with {source.said}, {sent:,} bytes sent")
    return model


def _read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and (not isinstance(found, torch.dtype) or not found.is_floating_point):
        raise InvalidInput(
            f"dtype must be one of {', '.join(_DTYPES)} or a torch dtype of floats, got {dtype!r}."
        )
    return found


def _check_prefetch(prefetch: int) -> int:
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise InvalidInput(f"prefetch must be a number of units, 0 or more, got {prefetch!r}.")
    return prefetch


def _check_fresh(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"shard() takes a torch.nn.Module, got {type(model).__name__}.")
    wrappers = (FSDPModule, FullyShardedDataParallel, nn.parallel.DistributedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            raise Unsupported(
                f"{name or 'The model'} is sharded or wrapped already ({type(module).__name__}); nothing was "
                "changed. Call shard() once, on the plain model."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise Unsupported(
                f"{name} is a DTensor already; nothing was changed. For tensor parallelism under FSDP call "
                "torch's fully_shard() with a mesh of both dimensions."
            )


def _check_dtypes(model: nn.Module, blocks: Blocks) -> None:
    """FSDP would refuse mixed dtypes only at the first forward pass."""
    taken: set[int] = set()
    for name in (*blocks.names, ""):
        own = [(n, p) for n, p in model.get_submodule(name).named_parameters() if id(p) not in taken]
        taken.update(id(p) for _, p in own)
        dtypes = {p.dtype: n for n, p in own if p.requires_grad}
        if len(dtypes) > 1:
            examples = ", ".join(f"{n} is {dtype}" for dtype, n in dtypes.items())
            raise InvalidInput(
                f"Parameters of one unit must have one dtype, but in {name or 'the unit of the whole model'} "
                f"{examples}; nothing was changed. Convert the model to one dtype (dtype= chooses what it "
                "computes in), or give the others a unit of their own with at=."
            )


def _check_done(model: nn.Module, layout: Layout) -> None:
    """A parameter that no unit took would be trained on each rank by itself, without a word."""
    for name, parameter in _registered(model):
        if not isinstance(parameter, DTensor) or parameter.device_mesh.shape != layout.mesh_shape:
            raise Internal(f"{name} was not sharded over {layout.num_ranks} ranks.")


def _registered(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from model.named_parameters(remove_duplicate=False)


def _tell(model: nn.Module, blocks: Blocks, filled: str | None) -> None:
    lines = [str(describe(model)), f"  blocks: {blocks.found}"]
    if blocks.left:
        lines.append(f"  left to the root, since they share parameters: {', '.join(blocks.left)}")
    if filled:
        lines.append(f"  {filled}")
    text = "\n".join(lines)
    sys.stderr.write(f"holdfast: {text}\n")
    sys.stderr.flush()
