"""Agreement: which ranks hold a plain tensor, as far as ranks have told each other; asked for rarely."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import InvalidInput
from holdfast.format.hashes import digest
from holdfast.format.sealed import dumps
from holdfast.state.sharding import Layout, held_by

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Known:
    """What a rank tells of one tensor: `layout` None says that the tensor is plain."""

    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one rank has.

    Args:
        keys: top-level keys of its state.
        tensors: by name, those of modules and single tensors that are not per rank.
        others: names of its other module tensors.
    """

    keys: frozenset[str]
    tensors: dict[str, Known]
    others: frozenset[str]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Who holds what.

    A plain tensor is held, in this order: by the ranks that the user has named; by the ranks that had its
    name when they agreed; if it is an optimizer's, by the ranks that hold its parameter; and else by all
    ranks if all are alike. If not: by this rank alone if it is a module's, otherwise by all ranks that have
    its top-level key.

    Args:
        rank: this rank.
        world_size: number of ranks.
        is_alike: all ranks have the same names under the same keys, as far as is known.
        layouts: by name; empty if all ranks have the same.
        keys: the ranks that have a top-level key; empty if all ranks have the same.
        names: every name that some rank has; empty if all ranks have the same.
        marked: top-level key -> ranks that the user has named.
    """

    rank: int
    world_size: int
    is_alike: bool = True
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    keys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    marked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def layout(self, name: str, raw: Layout | None, *, is_lowest: bool, in_module: bool) -> Layout:
        """The layout of a tensor that belongs to no parameter.

        Args:
            name: its name.
            raw: what the tensor itself says, None if it is plain.
            is_lowest: only the lowest of its ranks has the true bytes.
            in_module: it is a module's.
        """
        known = self._marked(name) if raw is None and self.marked else None
        known = known or self.layouts.get(name) or raw or self._unknown(name, in_module=in_module)
        return held_by((min(known.holders),)) if is_lowest and raw is None else known

    def follow(self, raw: Layout | None, parameter: Layout, parameter_raw: Layout | None) -> Layout:
        """The layout of an optimizer's tensor, given its parameter's, agreed and as the parameter says it."""
        if raw is None:
            return held_by(tuple(sorted(parameter.holders)))
        return parameter if raw == parameter_raw else raw

    def _marked(self, name: str) -> Layout | None:
        key = _key_of(name, self.marked)
        return None if key is None else held_by(self.marked[key])

    def _unknown(self, name: str, *, in_module: bool) -> Layout:
        if self.is_alike:
            return held_by(tuple(range(self.world_size)))
        key = None if in_module else _key_of(name, self.keys)
        return held_by((self.rank,) if key is None else self.keys[key])


def agree(mine: Inventory, rank: int, world_size: int, gather: Gather) -> Agreement:
    """Find out who holds what.

    Digests are compared first; only if they differ, one rank of each kind tells what it has.

    Raises:
        InvalidInput: two ranks have different tensors under one name.

    Ranks: collective if there are several; `gather` answers every rank's value, by rank.
    Blocks: on `gather`.
    """
    if world_size == 1:
        return Agreement(rank, world_size)
    table = _told(mine)
    digests = gather(digest(dumps(table)))
    first = {one: i for i, one in reversed(list(enumerate(digests)))}
    if len(first) == 1:
        return Agreement(rank, world_size)
    tables = gather(table if first[digests[rank]] == rank else None)
    kinds = [
        (tables[i], [r for r, one in enumerate(digests) if one == kind])
        for kind, i in sorted(first.items(), key=lambda pair: pair[1])
    ]
    return _merged(kinds, rank, world_size)


def _told(mine: Inventory) -> dict[str, Any]:
    """An inventory as plain values, each layout once."""
    numbers: dict[int, int] = {}
    layouts: list[Any] = []
    tensors: dict[str, Any] = {}
    for name, known in sorted(mine.tensors.items()):
        layout = known.layout
        number = None
        if layout is not None:
            if id(layout) not in numbers:
                numbers[id(layout)] = len(layouts)
                layouts.append([layout.splits, layout.copies, layout.boxes])
            number = numbers[id(layout)]
        tensors[name] = [known.dtype, list(known.shape), number]
    return {"keys": sorted(mine.keys), "layouts": layouts, "tensors": tensors, "others": sorted(mine.others)}


@dataclass(slots=True)
class _Merge:
    """What is known of one name so far, and from which rank."""

    rank: int
    fact: tuple[Any, ...]
    copies: set[tuple[int, ...]]


def _merged(kinds: list[tuple[dict[str, Any], list[int]]], rank: int, world_size: int) -> Agreement:
    merges: dict[str, _Merge] = {}
    keys: dict[str, list[int]] = {}
    names: set[str] = set()
    for table, ranks in kinds:
        names.update(table["tensors"], table["others"])
        for key in table["keys"]:
            keys.setdefault(key, []).extend(ranks)
        each = [(one,) for one in ranks]
        for name, (dtype, shape, number) in table["tensors"].items():
            splits, copies, boxes = ((), each, None) if number is None else table["layouts"][number]
            fact = (dtype, tuple(shape), splits, boxes)
            merge = merges.setdefault(name, _Merge(ranks[0], fact, set()))
            if merge.fact != fact:
                raise _disagreement(name, merge, ranks[0], fact)
            merge.copies.update(copies)
    layouts = _shared(merges)
    return Agreement(
        rank,
        world_size,
        is_alike=all(_names(table) == _names(kinds[0][0]) for table, _ in kinds),
        layouts=layouts,
        keys={key: tuple(sorted(ranks)) for key, ranks in keys.items()},
        names=frozenset(names),
    )


def _names(table: dict[str, Any]) -> list[set[str]]:
    return [set(table["keys"]), set(table["tensors"]), set(table["others"])]


def _shared(merges: dict[str, _Merge]) -> dict[str, Layout]:
    """The merged layouts; equal ones are one object."""
    known: dict[Any, Layout] = {}
    layouts: dict[str, Layout] = {}
    for name, merge in merges.items():
        _, _, splits, boxes = merge.fact
        key = (splits, boxes, frozenset(merge.copies))
        if key not in known:
            copies = tuple(sorted(merge.copies))
            is_whole = not splits and boxes is None
            known[key] = held_by(tuple(r for (r,) in copies)) if is_whole else Layout(splits, copies, boxes)
        layouts[name] = known[key]
    return layouts


def _disagreement(name: str, merge: _Merge, rank: int, fact: tuple[Any, ...]) -> InvalidInput:
    def told(fact: tuple[Any, ...]) -> str:
        dtype, shape, splits, boxes = fact
        cut = f"cut by {list(splits)}" if splits else "cut into boxes" if boxes else "whole"
        return f"{dtype}{list(shape)}, {cut}"

    message = (
        f"{name} is {told(merge.fact)} on rank {merge.rank} but {told(fact)} on rank {rank}. Nothing was "
        "saved. Give different tensors different keys, or mark their object with per_rank() if every rank "
        "has its own."
    )
    return InvalidInput(message, key=name, rank=rank)


def _key_of(name: str, keys: Mapping[str, Any]) -> str | None:
    """The longest key that a name is under."""
    found = [key for key in keys if name == key or name.startswith(f"{key}.")]
    return max(found, key=len, default=None)
