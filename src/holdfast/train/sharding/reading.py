"""`describe`: reads how a model is spread over the ranks from the model itself, whoever has sharded it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from holdfast.state.sharding import local_of
from holdfast.train.sharding.description import Description, Part, Unit
from holdfast.train.sharding.layout import Layout
from holdfast.train.sharding.world import backends_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def describe(model: nn.Module) -> Description:
    """Say how a model is spread over the ranks: its units, and what this rank holds of them.

    It tells of what `shard` has done, and of what was done with torch's `fully_shard` by hand.

    Args:
        model: any module.

    Returns:
        The facts; `print` shows them as a tree.

    Ranks: not collective; bytes are this rank's.
    """
    states = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    units = {
        name.replace("._checkpoint_wrapped_module", ""): _unit(module, is_root=not name)
        for name, module in states.items()
    }
    first = _first_group(states.values())
    mesh: Any = None if first is None else first.mesh_info.mesh
    plain = {id(p): p for p in model.parameters()} if first is None else _outside(model, states.values())
    plain_bytes = sum(p.nbytes for p in plain.values())
    layout = None if mesh is None else Layout(mesh.size(), mesh.shape[-1])
    root = _Tree(model).root
    return Description(
        kind=root.kind,
        layout=layout,
        device="" if mesh is None else mesh.device_type,
        backend="" if mesh is None else backends_of(mesh.get_group(mesh.ndim - 1)).get(mesh.device_type, ""),
        dtype=_compute_dtype(states.values()),
        is_offloaded=first is not None and isinstance(first.offload_policy, CPUOffloadPolicy),
        num_params=sum(u.num_params for u in units.values()) + sum(p.numel() for p in plain.values()),
        num_bytes=sum(u.num_bytes for u in units.values()) + plain_bytes,
        local_bytes=sum(u.local_bytes for u in units.values()) + plain_bytes,
        units=units,
        root=root,
        notes=tuple(_notes(model, layout, plain.values(), first, _compute_dtype(states.values()))),
    )


def _notes(
    model: nn.Module,
    layout: Layout | None,
    plain: Iterable[torch.Tensor],
    first: Any,
    compute: torch.dtype | None,
) -> Iterable[str]:
    if layout is None:
        yield _unsharded(model)
        return
    if count := sum(p.requires_grad for p in plain):
        yield f"{count} parameters are in no unit: every rank trains its own, and they drift apart"
    if layout.num_ranks == 1:
        yield "there is one rank: nothing is shared or sent"
    if isinstance(first.offload_policy, CPUOffloadPolicy) and first.device.type == "cpu":
        yield "the parameters are in host memory as it is: offload changes nothing here"
    floats = [name for name, one in model.named_buffers() if one.is_floating_point() and one.dtype != compute]
    if floats and compute is not None:
        yield (
            f"{len(floats)} buffers keep their dtype ({floats[0]}): convert them where they meet activations"
        )
    norms = [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)]
    if norms and layout.num_ranks > 1:
        yield (
            f"{len(norms)} batch norms see their own rank's batch only, and each rank has running statistics "
            "of its own"
        )


def _unsharded(model: nn.Module) -> str:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return f"DDP: each of {dist.get_world_size(model.process_group)} ranks has all of it"
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "FSDP1: what it has flattened is not told here"
    return "nothing is sharded: holdfast.shard(model) does that"


class _Tree:
    """Builds the tree of a model's parts; tied parameters count where they stand first."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(_plain(name))
        self._counted: set[int] = set()
        self.root = self._part("", model, "", is_root=True)

    def _part(self, name: str, module: nn.Module, path: str, *, is_root: bool = False) -> Part:
        unit = _unit(module, is_root=is_root) if isinstance(module, FSDPModule) else None
        inner = _unwrapped(module)
        if not is_root and not any(isinstance(m, FSDPModule) for m in inner.modules() if m is not module):
            count, tied = self._count(inner.parameters(), path)
            return Part(name, _kind(inner), count, unit, tied)
        count, tied = self._count(inner.parameters(recurse=False), path)
        parts = tuple(
            self._part(child_name, child, f"{path}.{child_name}" if path else child_name)
            for child_name, child in inner.named_children()
            if any(True for _ in child.parameters())
        )
        return Part(name, _kind(inner), count, unit, tied, parts)

    def _count(self, parameters: Iterable[torch.Tensor], path: str) -> tuple[int, tuple[str, ...]]:
        """Elements that were not counted yet; other names of these, and the first name of those that were."""
        own = f"{path}." if path else ""
        count, tied = 0, []
        for parameter in parameters:
            first, *others = self._names[id(parameter)]
            if id(parameter) in self._counted:
                tied.append(first)
                continue
            self._counted.add(id(parameter))
            count += parameter.numel()
            tied += [name for name in others if path and not name.startswith(own)]
        return count, tuple(tied)


def _unit(module: Any, *, is_root: bool) -> Unit:
    held = [one for group in _groups(module) for one in group.fsdp_params]
    params = [one.sharded_param for one in held]
    group = next(iter(_groups(module)), None)
    inner = _unwrapped(module)
    return Unit(
        num_params=sum(p.numel() for p in params),
        num_bytes=sum(p.numel() * p.element_size() for p in params),
        local_bytes=sum(local_of(p).nbytes for p in params),
        gathered_bytes=sum(
            one.sharded_param.numel() * (one.mp_policy.param_dtype or one.sharded_param.dtype).itemsize
            for one in held
        ),
        is_kept=group is None or group.post_forward_mesh_info is None or (is_root and _is_undecided(module)),
        is_recomputed=inner is not module,
        is_compiled=module._compiled_call_impl is not None,
    )


def _is_undecided(module: Any) -> bool:
    """Whether FSDP is to decide what is kept, which it does at the first forward: the root is."""
    return bool(getattr(module._get_fsdp_state(), "_auto_reshard_after_forward", False))


def _groups(module: Any) -> list[Any]:
    """What FSDP2 holds of a unit; a list from torch 2.12 on."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def _compute_dtype(modules: Iterable[Any]) -> torch.dtype | None:
    """Return the dtype in which the first unit computes; None for that of its parameters."""
    held = (one for module in modules for group in _groups(module) for one in group.fsdp_params)
    first = next(held, None)
    return None if first is None else first.mp_policy.param_dtype


def _first_group(modules: Iterable[Any]) -> Any:
    return next((group for module in modules for group in _groups(module)), None)


def _outside(model: nn.Module, modules: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Parameters that are in no unit."""
    held = [one for module in modules for group in _groups(module) for one in group.fsdp_params]
    known = {id(one.sharded_param) for one in held} | {
        id(getattr(one, "_unsharded_param", None)) for one in held
    }
    return {id(p): p for p in model.parameters() if id(p) not in known}


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = module._modules.get("_checkpoint_wrapped_module")
    return module if inner is None else inner


def _kind(module: nn.Module) -> str:
    return (
        type(module).__name__.removeprefix("FSDP")
        if isinstance(module, FSDPModule)
        else type(module).__name__
    )


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")
