"""Blocks of a model: the modules whose parameters are gathered and freed together; pure."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct
from torch import nn

from holdfast.errors import InvalidInput

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
