"""`shard`: finds the blocks of a model, and shards them across ranks with FSDP2."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from msgspec import Struct
from msgspec.structs import astuple
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.ranks import Ranks
from holdfast.errors import Internal, InvalidInput, Unsupported
from holdfast.system.log import get_logger
from holdfast.train.sharding.inspection import describe
from holdfast.train.sharding.process_group import ensure_process_group, make_mesh_layout
from holdfast.train.sharding.weights import (
    ModelDigest,
    WeightsLike,
    broadcast_weights,
    choose_source,
    digest_model,
    materialize,
)

_RANKS_TIMEOUT_S = 3600.0
MIN_PARAMS = 20_000  # parameters of a block in models without layers. The FSDP tutorial's `min_num_params`

WrapPolicy: TypeAlias = "int | str | type | nn.Module | Iterable[str | type | nn.Module]"
"""Choice of blocks: by size, class, name or pattern, module, or several of these."""

_Named = tuple[str, nn.Module]
_GROUPS = (nn.ModuleList, nn.ModuleDict)
_INDIVISIBLE = (nn.MultiheadAttention,)  # uses parameters of its children without calling them


class Blocks(Struct, frozen=True):
    """The blocks of a model."""

    names: tuple[str, ...]  # module names, inner ones before outer ones, otherwise in the model's order
    found: str  # text on how they were found
    left: tuple[str, ...] = ()
    """Candidates that share parameters with other parts of the model, so the root's unit has them."""


def find_blocks(model: nn.Module, wrap: WrapPolicy | None = None) -> Blocks:
    """Return the modules of `model` to use as units. All other parameters belong to the root's unit.

    Without `wrap` these are the first of: the outermost repeated modules of lists and sequences (transformer
    layers), the classes in a Hugging Face model's `_no_split_modules`, or every module of at least
    `MIN_PARAMS` parameters. A module that shares a parameter with another part of the model is left out.

    Args:
        wrap: the caller's choice: a minimum number of parameters, classes or their names, module names or
            patterns (`"encoder.block.*"`), modules, or an empty list for no blocks.
    """
    if wrap is None:
        candidates, found = _search(model)
    elif isinstance(wrap, int) and not isinstance(wrap, bool):
        if wrap < 1:
            raise InvalidInput(f"wrap={wrap} must be at least 1 as a minimum number of parameters.")
        candidates, found = list(_of_size(model, wrap)), f"modules of at least {wrap:,} parameters"
    else:
        wanted: list[object] = [wrap]
        if isinstance(wrap, Iterable) and not isinstance(wrap, (str, type, nn.Module)):
            wanted = list(wrap)
        if not all(isinstance(one, (str, type, nn.Module)) for one in wanted):
            raise InvalidInput(f"wrap must be classes, modules or a number of parameters, got {wrap!r}.")
        candidates = _matching(model, wanted)
        found = "as given" if wanted else "none"
    distinct: dict[int, _Named] = {}  # modules with parameters; one may occur several times
    for name, module in candidates:
        if any(True for _ in module.parameters()):
            distinct.setdefault(id(module), (name, module))
    candidates = list(distinct.values())
    shared = _sharing(model, candidates)
    names = [name for name, _ in candidates if name not in shared]
    return Blocks(tuple(names), found, tuple(name for name, _ in candidates if name in shared))


def _search(model: nn.Module) -> tuple[list[_Named], str]:
    layers = list(_repeated(model, ""))
    if layers:
        kinds = ", ".join(dict.fromkeys(type(module).__name__ for _, module in layers))
        return layers, f"repeated layers: {kinds}"
    unsplit = [name for name in getattr(model, "_no_split_modules", None) or () if isinstance(name, str)]
    named = [(name, one) for name, one in _inner_first(model) if type(one).__name__ in unsplit]
    if named:
        return named, f"_no_split_modules of the model: {', '.join(sorted(unsplit))}"
    found = f"no repeated layers, so modules of at least {MIN_PARAMS:,} parameters"
    return list(_of_size(model, MIN_PARAMS)), found


def _repeated(module: nn.Module, path: str) -> Iterator[_Named]:
    """Yield outermost members of lists and sequences whose class occurs there at least twice."""
    if not isinstance(module, (*_GROUPS, nn.Sequential)):
        for name, child in module.named_children():
            yield from _repeated(child, _join(path, name))
        return
    members = list(_members(module, path))
    count = Counter(type(member) for _, member in members)
    for name, member in members:
        if count[type(member)] >= 2 and list(member.children()):
            yield name, member
        else:
            yield from _repeated(member, name)


def _members(group: nn.Module, path: str) -> Iterator[_Named]:
    """Yield the members of a list, and of lists inside it. Lists are never called themselves."""
    for name, child in group.named_children():
        if isinstance(child, _GROUPS) and not _is_callable(child):
            yield from _members(child, _join(path, name))
        else:
            yield _join(path, name), child


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _of_size(model: nn.Module, min_params: int) -> Iterator[_Named]:
    """Yield modules with enough parameters outside of inner units, like FSDP1's size policy.

    Source: `size_based_auto_wrap_policy` of torch.distributed.fsdp.wrap.
    """
    seen: set[int] = set()  # a tied parameter counts once

    def walk(module: nn.Module, path: str) -> tuple[int, list[_Named]]:
        own = [p for p in module.parameters(recurse=isinstance(module, _INDIVISIBLE)) if id(p) not in seen]
        seen.update(id(p) for p in own)
        free, found = sum(p.numel() for p in own), []
        for name, child in () if isinstance(module, _INDIVISIBLE) else module.named_children():
            left, inner = walk(child, _join(path, name))
            free += left
            found += inner
        if path and free >= min_params and _is_callable(module):
            return 0, [*found, (path, module)]
        return free, found

    yield from walk(model, "")[1]


def _matching(model: nn.Module, wanted: Sequence[object]) -> list[_Named]:
    modules = list(_inner_first(model))
    for wish in wanted:
        if not any(_fits(wish, name, module) for name, module in modules):
            kinds = ", ".join(sorted({type(module).__name__ for _, module in modules}))
            shown = wish.__name__ if isinstance(wish, type) else repr(wish)
            raise InvalidInput(
                f"wrap= has {shown}, but the model has no such module. Its classes are {kinds}."
            )
    chosen = [(name, one) for name, one in modules if any(_fits(wish, name, one) for wish in wanted)]
    for name, module in chosen:
        if not _is_callable(module):
            raise InvalidInput(
                f"wrap= has {name}, a {type(module).__name__}, which is never called, so its parameters "
                f'would never be gathered. Use its members instead: "{name}.*".'
            )
    return chosen


def _fits(wanted: object, name: str, module: nn.Module) -> bool:
    if isinstance(wanted, str):
        own, pattern = name.split("."), wanted.split(".")
        return type(module).__name__ == wanted or (
            len(own) == len(pattern) and all(map(fnmatch.fnmatchcase, own, pattern))
        )
    return isinstance(module, wanted) if isinstance(wanted, type) else module is wanted


def _inner_first(model: nn.Module) -> Iterator[_Named]:
    """Yield all modules except the model itself, children before parents, each once."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[_Named]:
        for name, child in module.named_children():
            if id(child) not in seen:
                seen.add(id(child))
                inner = _join(path, name)
                yield from walk(child, inner)
                yield inner, child

    yield from walk(model, "")


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _sharing(model: nn.Module, candidates: list[_Named]) -> set[str]:
    """Return the names of candidates with a parameter that is also used outside of them."""
    everywhere = _uses(model)
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {
        name
        for name, one in candidates
        if any(count * places[id(one)] < everywhere[parameter] for parameter, count in _uses(one).items())
    }


def _uses(module: nn.Module) -> Counter[int]:
    """Return the number of occurrences of each parameter, by its identity."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


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
        fsdp.fully_shard(block, reshard_after_forward=reshard_after_forward, **policies)
    # The backward pass starts right after the forward pass, so freeing the root in between would be wasted.
    fsdp.fully_shard(model, reshard_after_forward=False, **policies)
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
    ranks = Ranks(timeout_s=_RANKS_TIMEOUT_S)
    layout = make_mesh_layout(shards, ranks.world_size)
    blocks = find_blocks(model, wrap)
    _check_dtypes(model, blocks)
    digest = digest_model(model)
    digests = [ModelDigest(*row) for row in ranks.gather(astuple(digest))]
    source = choose_source(model, digests, weights, ranks)
    offload = fsdp.CPUOffloadPolicy(pin_memory=device != "cpu") if cpu_offload else fsdp.OffloadPolicy()
    _make_units(
        model,
        blocks.names,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
        mesh=init_device_mesh(device, layout.mesh_shape, mesh_dim_names=layout.mesh_names),
        mp_policy=fsdp.MixedPrecisionPolicy(computed, None if computed is None else torch.float32),
        offload_policy=offload,
    )
    if digest.on_meta:
        materialize(model, device, cpu_offload=cpu_offload)
    sent_bytes = 0 if source is None else broadcast_weights(model, source, device, ranks)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Otherwise each rank would train its own, without a warning.
        if not isinstance(parameter, DTensor) or parameter.device_mesh.shape != layout.mesh_shape:
            raise Internal(f"{name} was not sharded over {layout.num_ranks} ranks.")
    ranks.barrier_and_close()
    if ranks.rank == 0 and not quiet:
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
    wrappers = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel, nn.parallel.DistributedDataParallel)
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
