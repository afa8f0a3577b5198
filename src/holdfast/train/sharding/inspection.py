"""`describe`: inspects how a model is sharded across ranks, from the model itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from holdfast.checkpoint.state.sharding import local_of
from holdfast.system.units import format_bytes, plural
from holdfast.train.sharding.process_group import MeshLayout, backends_of


class Unit(Struct, frozen=True):
    """Parameters that are gathered and freed together."""

    num_params: int  # elements of all parameters, unsharded
    num_bytes: int  # bytes of all parameters, in the optimizer's dtype
    local_bytes: int  # bytes of this rank's shard
    gathered_bytes: int  # additional bytes of a rank while it computes with them
    is_kept: bool  # the parameters stay gathered between forward and backward
    is_recomputed: bool = False  # backward recomputes the activations
    is_compiled: bool = False  # the forward is compiled separately


class Description(Struct, frozen=True):
    """Sharding of a model across ranks. `print` shows it."""

    kind: str  # class of the model
    layout: MeshLayout | None  # the ranks that share one copy. None if the model is not sharded
    device: str  # device type of the computation
    backend: str  # backend for its tensors
    dtype: torch.dtype | None  # dtype of the computation. None computes in the parameters' dtype
    is_offloaded: bool  # parameters live in host memory
    num_params: int  # elements of all parameters
    num_bytes: int  # bytes of all parameters
    local_bytes: int  # bytes of this rank's shards
    units: dict[str, Unit]  # units by name. The unit of the whole model is ""
    notes: tuple[str, ...]  # remarks for the reader

    @property
    def gathered_bytes(self) -> int:
        """Most bytes of gathered parameters at once: units that are kept, and two others."""
        kept = sum(unit.gathered_bytes for unit in self.units.values() if unit.is_kept)
        freed = sorted(unit.gathered_bytes for unit in self.units.values() if not unit.is_kept)
        return kept + sum(freed[-2:])  # the next one is gathered while one computes

    def __str__(self) -> str:
        notes = (f"  note: {note}" for note in self.notes)
        return "\n".join([*_head(self), *_unit_lines(self.units), *notes])


def _head(found: Description) -> Iterator[str]:
    size = f"{found.num_params:,} parameters, {format_bytes(found.num_bytes)}"
    if found.layout is None:
        yield f"{found.kind}: {size}"
        return
    root = found.units.get("")
    inner = [unit for name, unit in found.units.items() if name]
    is_kept = all(unit.is_kept for unit in inner) if inner else root is not None and root.is_kept
    layout = found.layout.describe(reshard_after_forward=not is_kept)
    yield f"{found.kind} {layout}, on {found.device} over {found.backend}"
    share = found.local_bytes / found.num_bytes if found.num_bytes else 1.0
    yield (
        f"  {size}; this rank holds {format_bytes(found.local_bytes)} ({share:.1%}) and gathers up to "
        f"{format_bytes(found.gathered_bytes)} more"
    )
    if found.dtype is not None:
        yield f"  computes in {str(found.dtype).removeprefix('torch.')}, averages gradients in float32"
    features = [
        ("offloaded to host memory", found.is_offloaded),
        ("recomputed in backward", any(unit.is_recomputed for unit in inner)),
        ("compiled by block", any(unit.is_compiled for unit in inner)),
    ]
    if texts := [text for text, applies in features if applies]:
        yield f"  {', '.join(texts)}"


def _unit_lines(units: dict[str, Unit]) -> Iterator[str]:
    """Yield a line per unit. Equal neighbours in a list of modules are one line."""

    def list_and_unit(name: str) -> tuple[str, Unit]:
        parent, _, last = name.rpartition(".")
        return f"{parent}." if last.isdigit() else name, units[name]

    for (_, unit), equal in itertools.groupby(units, key=list_and_unit):
        name, *others = equal
        title = f"unit {name}: " if name else "unit of the whole model: "
        if others:
            title = f"{len(others) + 1} units, {name} to {others[-1]}: each "
        own, whole = format_bytes(unit.local_bytes), format_bytes(unit.num_bytes)
        kept = "kept after forward" if unit.is_kept else "freed after forward"
        yield f"  {title}{unit.num_params:,} parameters, {own} of {whole} here, {kept}"


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def describe(model: nn.Module) -> Description:
    """Describe how a model is sharded across ranks: its units, and this rank's part of them.

    It works for models sharded with `shard` and with torch's `fully_shard`.

    Args:
        model: any module.

    Returns:
        The facts. `print` shows them, with a line per unit.

    Ranks: not collective; byte counts are this rank's.
    """
    states = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    units = {
        name.replace("._checkpoint_wrapped_module", ""): _unit(module, is_root=not name)
        for name, module in states.items()
    }
    first = next((group for module in states.values() for group in _groups(module)), None)
    held = [one for module in states.values() for one in _held(module)]
    dtype = held[0].mp_policy.param_dtype if held else None
    mesh: Any = None if first is None else first.mesh_info.mesh
    # The parameters outside of all units, each once.
    known = {id(getattr(one, name, None)) for one in held for name in ("sharded_param", "_unsharded_param")}
    plain = [p for p in model.parameters() if id(p) not in known]
    plain_bytes = sum(p.nbytes for p in plain)
    layout = None if mesh is None else MeshLayout(mesh.size(), mesh.shape[-1])
    return Description(
        kind=_kind_of(model),
        layout=layout,
        device="" if mesh is None else mesh.device_type,
        backend="" if mesh is None else backends_of(mesh.get_group(mesh.ndim - 1)).get(mesh.device_type, ""),
        dtype=dtype,
        is_offloaded=first is not None and isinstance(first.offload_policy, CPUOffloadPolicy),
        num_params=sum(u.num_params for u in units.values()) + sum(p.numel() for p in plain),
        num_bytes=sum(u.num_bytes for u in units.values()) + plain_bytes,
        local_bytes=sum(u.local_bytes for u in units.values()) + plain_bytes,
        units=units,
        notes=tuple(_notes(model, layout, plain, first, dtype)),
    )


def _notes(
    model: nn.Module,
    layout: MeshLayout | None,
    plain: Iterable[torch.Tensor],
    first: Any,
    compute: torch.dtype | None,
) -> Iterable[str]:
    if layout is None:
        text = "not sharded; call holdfast.shard(model) to shard it"
        if isinstance(model, nn.parallel.DistributedDataParallel):
            text = f"DDP: each of {dist.get_world_size(model.process_group)} ranks has a full copy"
        elif any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            text = "FSDP1: describe() does not show its flattened parameters"
        yield text
        return
    if count := sum(p.requires_grad for p in plain):
        yield (
            f"{plural(count, 'parameter')} outside of all units: each rank trains its own, without "
            "synchronization"
        )
    if layout.num_ranks == 1:
        yield "with one rank, nothing is sharded or communicated"
    if isinstance(first.offload_policy, CPUOffloadPolicy) and first.device.type == "cpu":
        yield "the parameters are in host memory anyway: cpu_offload has no effect"
    floats = [name for name, one in model.named_buffers() if one.is_floating_point() and one.dtype != compute]
    if floats and compute is not None:
        yield (
            f"{plural(len(floats), 'buffer')} in another dtype ({floats[0]}): convert before adding to "
            "activations"
        )
    norms = [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)]
    if norms and layout.num_ranks > 1:
        yield f"{plural(len(norms), 'batch norm')} with statistics of each rank's own batch only"


def _kind_of(model: nn.Module) -> str:
    """Return the name of a model's class, without the prefix that FSDP2 gave it."""
    inner = _unwrapped(model)
    kind = type(inner).__name__
    return kind.removeprefix("FSDP") if isinstance(inner, FSDPModule) else kind


def _unit(module: Any, *, is_root: bool) -> Unit:
    held = _held(module)
    params = [one.sharded_param for one in held]
    group = next(iter(_groups(module)), None)
    # FSDP decides on some root units at the first forward pass.
    is_undecided = is_root and getattr(module._get_fsdp_state(), "_auto_reshard_after_forward", False)
    return Unit(
        num_params=sum(p.numel() for p in params),
        num_bytes=sum(p.numel() * p.element_size() for p in params),
        local_bytes=sum(local_of(p).nbytes for p in params),
        gathered_bytes=sum(
            one.sharded_param.numel() * (one.mp_policy.param_dtype or one.sharded_param.dtype).itemsize
            for one in held
        ),
        is_kept=group is None or group.post_forward_mesh_info is None or is_undecided,
        is_recomputed=_unwrapped(module) is not module,
        is_compiled=module._compiled_call_impl is not None,
    )


def _groups(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a unit. From torch 2.12 on it has a list of them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def _held(module: Any) -> list[Any]:
    """Return FSDP2's parameters of a unit."""
    return [one for group in _groups(module) for one in group.fsdp_params]


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = module._modules.get("_checkpoint_wrapped_module")
    return module if inner is None else inner
