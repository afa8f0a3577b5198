"""Rehearsal of load code on copies, before anything live changes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from types import CellType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.state.composites import is_composite
from holdfast.checkpoint.state.tensors import PLAIN
from holdfast.checkpoint.state.tree import references

_MISMATCH = "size mismatch for"  # torch's words for a shape that load code did not adapt


def has_load_code(module: torch.nn.Module) -> bool:
    """Return True if loading a module does more than copy its tensors."""
    return any(map(_has_own_load_code, module.modules()))


def _has_own_load_code(module: torch.nn.Module) -> bool:
    plain, kind = torch.nn.Module, type(module)
    return bool(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or kind.load_state_dict is not plain.load_state_dict
        or (
            kind._load_from_state_dict is not plain._load_from_state_dict
            and not kind._load_from_state_dict.__module__.startswith("torch.nn.")
        )
    )


def rehearse(value: Any, state: Any) -> None:
    """Load the state of one of PyTorch's schedulers or scalers into a copy.

    Their load code sets attributes and has no other effect. Code of other libraries or of the program may
    have any, so it is not called twice. A state with tensors is not complete before they are read.

    Raises:
        Exception: the load code rejects the state.
    """
    if not _is_pytorchs(value) or any(True for _ in references(state)):
        return
    try:
        trial = _apart(value)
    except Exception:  # noqa: BLE001 - a function of the program, in a scheduler, may refuse copies
        return
    trial.load_state_dict(copy.deepcopy(state))


def _is_pytorchs(value: Any) -> bool:
    return (
        isinstance(value, (LRScheduler, torch.amp.GradScaler))
        and type(value).load_state_dict.__module__.startswith("torch.")
        and all(map(_is_pytorchs, getattr(value, "_schedulers", ())))
    )


def _apart(value: Any) -> Any:
    """Return a copy that shares only what load code leaves alone."""
    new = object.__new__(type(value))
    vars(new).update({name: _item_apart(item) for name, item in vars(value).items()})
    return new


def _item_apart(item: Any) -> Any:
    if isinstance(item, list):
        return [_item_apart(one) for one in item]
    if isinstance(item, LRScheduler):
        return _apart(item)
    if isinstance(item, torch.Tensor):  # of one element
        return item.clone()
    return copy.copy(item) if callable(item) else item  # a lambda of a LambdaLR may be an object


def find_adaptable(root: torch.nn.Module, saved: Mapping[int, torch.Tensor]) -> frozenset[int]:
    """Return the ids of live tensors whose load code accepts saved tensors of other shapes.

    The load code of the nearest module that has some runs on a copy, whose tensors have no memory. Nothing
    live changes, and a module of another size is refused before a restore begins.

    Args:
        root: the module.
        saved: tensors on the meta device, with saved shapes and dtypes, by the id of the live tensor.
    """
    found: set[int] = set()
    changed = {key for key, one in _tensors_of(root) if _may_change(one, saved.get(key))}
    for module, ids in _loaders(root, changed):
        if _accepts(module, saved):
            found.update(ids)
    return frozenset(found)


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[int, torch.Tensor]]:
    return ((id(one), one) for one in chain(module.parameters(), module.buffers()))


def _may_change(live: torch.Tensor, saved: torch.Tensor | None) -> bool:
    is_plain = type(live) in PLAIN and live.layout is torch.strided and not live.is_meta
    return saved is not None and saved.shape != live.shape and is_plain and not is_composite(live)


def _loaders(root: torch.nn.Module, ids: Collection[int]) -> Iterator[tuple[torch.nn.Module, set[int]]]:
    """Yield each module whose load code is the nearest to some tensors, with their ids."""
    nearest: dict[str, tuple[torch.nn.Module, set[int]]] = {}
    modules = dict(root.named_modules())
    for path, module in modules.items():
        own = chain(module._parameters.values(), module._buffers.values())
        wanted = {id(one) for one in own if one is not None and id(one) in ids}
        at = path
        while wanted and not _has_own_load_code(modules[at]) and at:
            at = at.rpartition(".")[0]
        if wanted and _has_own_load_code(modules[at]):
            nearest.setdefault(at, (modules[at], set()))[1].update(wanted)
    yield from nearest.values()


def _accepts(module: torch.nn.Module, saved: Mapping[int, torch.Tensor]) -> bool:
    """Return True if load code, tried on a copy, takes the saved shapes."""
    if any(map(_is_bound_elsewhere, _hooks_of(module))):
        return False
    bare = {key: _without_memory(one) for key, one in _tensors_of(module)}
    try:
        trial = copy.deepcopy(module, {**bare})
    except Exception:  # noqa: BLE001 - FSDP2 refuses copies; then the shapes are an error, as everywhere else
        return False
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = saved.get(id(value), _without_memory(value))
    try:
        with torch.no_grad(), torch.device("meta"):  # what the load code makes fits the other tensors
            trial.load_state_dict(state, strict=False)
    except Exception as error:  # noqa: BLE001 - code that needs the values of tensors fails without memory
        return _MISMATCH not in str(error)
    return True


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    bare = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(bare, requires_grad=tensor.requires_grad)
    return bare


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    for one in module.modules():
        yield from one._load_state_dict_pre_hooks.values()
        yield from one._load_state_dict_post_hooks.values()


def _is_bound_elsewhere(hook: Any) -> bool:
    """Return True if a copy of its module would share live objects of a hook."""
    function = getattr(hook, "hook", hook)  # torch wraps hooks that receive their module
    cells: tuple[CellType, ...] = getattr(function, "__closure__", None) or ()
    return any(_holds_live(cell) for cell in cells)


def _holds_live(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, (torch.nn.Module, torch.Tensor))
    except ValueError:  # the variable has no value
        return False
