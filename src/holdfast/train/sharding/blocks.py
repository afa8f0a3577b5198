"""Finds the blocks of a model: the modules whose parameters are gathered and freed as one; pure."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from holdfast.errors import InvalidInput

BIG = 20_000
"""Parameters that make a module a block where no layers are found; the FSDP tutorial's `min_num_params`."""

Where: TypeAlias = "int | str | type | nn.Module | Iterable[str | type | nn.Module]"
"""How a caller names blocks: by size, class, name or pattern of names, module, or several of these."""

_Named = tuple[str, nn.Module]
_GROUPS = (nn.ModuleList, nn.ModuleDict)
_CLOSED = (nn.MultiheadAttention,)  # uses parameters of its children without calling them


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a model.

    Args:
        names: of the modules, inner ones before outer ones, otherwise in the model's order.
        found: how they were found, in words.
        left: candidates that share parameters with other parts of the model, and so stay in the root's unit.
    """

    names: tuple[str, ...]
    found: str
    left: tuple[str, ...] = ()


def find_blocks(model: nn.Module, at: Where | None = None) -> Blocks:
    """The modules of `model` that should be units of their own; whatever is in none belongs to the root's.

    Without `at` these are, of the first kind that there is: the outermost repeated modules of lists and
    sequences (transformer layers), the classes that a Hugging Face model will not have split, or every module
    of at least `BIG` parameters. A module that shares a parameter with another part of the model is left out.

    Args:
        model: any module; its parameters may be on meta.
        at: what the caller names instead: a least number of parameters, classes or their names, names of
            modules or patterns of them (`"encoder.block.*"`), modules; an empty list for no blocks at all.

    Raises:
        InvalidInput: something in `at` is not in the model, or cannot be called.
    """
    if at is None:
        candidates, found = _search(model)
    elif isinstance(at, int) and not isinstance(at, bool):
        if at < 1:
            raise InvalidInput(f"at={at} is no least number of parameters; it must be at least 1.")
        candidates, found = list(_of_size(model, at)), f"modules of at least {at:,} parameters"
    else:
        wanted = [at] if isinstance(at, (str, type, nn.Module)) else list(_iterate(at))
        candidates = _matching(model, wanted)
        found = "as named" if wanted else "none, as asked"
    candidates = list(_distinct(candidates))
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
        return named, f"classes that the model will not have split: {', '.join(sorted(unsplit))}"
    return list(_of_size(model, BIG)), f"no repeated layers, so modules of at least {BIG:,} parameters"


def _repeated(module: nn.Module, path: str) -> Iterator[_Named]:
    """Outermost members of lists and sequences whose class occurs there at least twice."""
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
    """Members of a list, also of lists in it: these are never called themselves."""
    for name, child in group.named_children():
        if isinstance(child, _GROUPS) and not _is_callable(child):
            yield from _members(child, _join(path, name))
        else:
            yield _join(path, name), child


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _of_size(model: nn.Module, least: int) -> Iterator[_Named]:
    """Modules with so many parameters that are in no unit inside them, as FSDP1's size policy has it.

    Source: `size_based_auto_wrap_policy` of torch.distributed.fsdp.wrap.
    """
    seen: set[int] = set()  # a tied parameter counts once

    def walk(module: nn.Module, path: str) -> tuple[int, list[_Named]]:
        own = [p for p in module.parameters(recurse=isinstance(module, _CLOSED)) if id(p) not in seen]
        seen.update(id(p) for p in own)
        free, found = sum(p.numel() for p in own), []
        for name, child in () if isinstance(module, _CLOSED) else module.named_children():
            left, inner = walk(child, _join(path, name))
            free += left
            found += inner
        if path and free >= least and _is_callable(module):
            return 0, [*found, (path, module)]
        return free, found

    yield from walk(model, "")[1]


def _matching(model: nn.Module, wanted: Sequence[object]) -> list[_Named]:
    modules = list(_inner_first(model))
    used: set[int] = set()
    chosen: list[_Named] = []
    for name, module in modules:
        fits = [i for i, one in enumerate(wanted) if _fits(one, name, module)]
        used.update(fits)
        if fits:
            chosen.append((name, module))
    for i, one in enumerate(wanted):
        if i not in used:
            kinds = ", ".join(sorted({type(module).__name__ for _, module in modules}))
            raise InvalidInput(f"at= names {_say(one)}, but the model has no such module. It has {kinds}.")
    for name, module in chosen:
        if not _is_callable(module):
            raise InvalidInput(
                f"at= names {name}, a {type(module).__name__}, which is never called, so that its parameters "
                "would "
                f'never be gathered. Name its members instead: "{name}.*".'
            )
    return chosen


def _fits(wanted: object, name: str, module: nn.Module) -> bool:
    if isinstance(wanted, str):
        own, asked = name.split("."), wanted.split(".")
        return type(module).__name__ == wanted or (
            len(own) == len(asked) and all(map(fnmatch.fnmatchcase, own, asked))
        )
    return isinstance(module, wanted) if isinstance(wanted, type) else module is wanted


def _iterate(at: object) -> Iterable[object]:
    if isinstance(at, Iterable):
        members = list(at)
        if all(isinstance(one, (str, type, nn.Module)) for one in members):
            return members
    raise InvalidInput(f"at must name classes, modules or a number of parameters, got {at!r}.")


def _say(wanted: object) -> str:
    return wanted.__name__ if isinstance(wanted, type) else repr(wanted)


def _inner_first(model: nn.Module) -> Iterator[_Named]:
    """All modules but the model itself, children before parents, each once."""
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


def _distinct(candidates: Sequence[_Named]) -> Iterator[_Named]:
    """Each module with parameters once, though it may stand in several places."""
    seen: set[int] = set()
    for name, module in candidates:
        if id(module) not in seen and any(True for _ in module.parameters()):
            seen.add(id(module))
            yield name, module


def _sharing(model: nn.Module, candidates: list[_Named]) -> set[str]:
    """Names of candidates one of whose parameters is also used outside of them."""
    everywhere = _uses(model)
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {
        name
        for name, one in candidates
        if any(count * places[id(one)] < everywhere[parameter] for parameter, count in _uses(one).items())
    }


def _uses(module: nn.Module) -> Counter[int]:
    """In how many places each parameter stands, by its identity."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
