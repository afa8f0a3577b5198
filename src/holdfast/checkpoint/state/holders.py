"""Holders of plain tensors: the ranks that hold each, as agreed by all ranks. Agreement is rare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format.agreement import check_regions
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.layout import Region
from holdfast.checkpoint.format.nesting import is_under
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.state.sharding import ShardLayout, held_by
from holdfast.errors import InvalidInput

Gather = Callable[[Any], list[Any]]


Held = tuple[str, tuple[int, ...], ShardLayout | None]
"""Dtype and shape of a whole tensor, and its layout, None if it is plain."""


class HolderAgreement(Struct, frozen=True):
    """Holders of each tensor.

    A plain tensor is held by the first of these that applies: the ranks that the user has named; the ranks
    that had its name at the agreement; for an optimizer's tensor, the ranks that hold its parameter; all
    ranks, if all are alike. Otherwise a module's tensor is held by this rank alone, and any other by all
    ranks that have its top-level key. Layouts, keys and names are empty if all ranks have the same.
    """

    rank: int
    world_size: int
    is_alike: bool = True  # all ranks have the same names under the same keys, according to the agreement
    layouts: Mapping[str, ShardLayout] = {}  # by name
    keys: Mapping[str, tuple[int, ...]] = {}  # the ranks that have a top-level key
    names: frozenset[str] = frozenset()  # that any rank has
    marked: Mapping[str, tuple[int, ...]] = {}  # ranks of a key, as users name them

    def layout(self, name: str, raw: ShardLayout | None, *, is_lowest: bool, in_module: bool) -> ShardLayout:
        """Return the layout of a tensor that belongs to no parameter.

        `raw` was read from the tensor itself; None if that is plain. With `is_lowest` only the lowest of its
        ranks has the true bytes.
        """
        marked = _key_of(name, self.marked) if raw is None else None
        agreed = self.layouts.get(name)
        if agreed is not None and agreed.regions is not None and raw is None:
            agreed = None  # a shard then, and a whole tensor now
        known = agreed or raw if marked is None else held_by(self.marked[marked])
        if known is None:
            ranks = tuple(range(self.world_size))
            if not self.is_alike:
                key = None if in_module else _key_of(name, self.keys)
                ranks = (self.rank,) if key is None else self.keys[key]
            known = held_by(ranks)
        return held_by((min(known.holders),)) if is_lowest and raw is None else known

    def follow(
        self, raw: ShardLayout | None, parameter: ShardLayout, parameter_raw: ShardLayout | None
    ) -> ShardLayout:
        """Return the layout of an optimizer's tensor, of its own and of its parameter's; see `layout`."""
        if raw is None:
            return held_by(tuple(sorted(parameter.holders)))
        return parameter if raw == parameter_raw else raw


def agree(mine: dict[str, Any], rank: int, world_size: int, gather: Gather) -> HolderAgreement:
    """Determine the holders of all tensors, together with the other ranks.

    Digests are compared first. Only if they differ, one rank of each kind sends its inventory. `mine` is that
    of this rank.

    Ranks: collective; `gather` returns the values of all ranks, by rank.
    Blocks: on `gather`.
    """
    digests = gather(digest(dumps(mine)))
    first = {one: i for i, one in reversed(list(enumerate(digests)))}
    has_own = any(is_own for *_, is_own in mine["layouts"])
    if len(first) == 1 and not has_own:
        return HolderAgreement(rank, world_size)
    tables = gather(mine if first[digests[rank]] == rank else None)
    kinds = [
        (tables[i], [r for r, one in enumerate(digests) if one == kind])
        for kind, i in sorted(first.items(), key=lambda pair: pair[1])
    ]
    return _merged(kinds, rank, world_size)


def inventory(keys: Iterable[str], tensors: Mapping[str, Held], others: Iterable[str]) -> dict[str, Any]:
    """Return the contents of a rank's state as plain values, with each layout once.

    `keys` are at the top level; `tensors` are of modules, or single ones, and not per rank; `others` are the
    names of the other tensors of modules.
    """
    numbers: dict[int, int] = {}
    layouts: list[Any] = []
    rows: dict[str, Any] = {}
    for name, (dtype, shape, layout) in sorted(tensors.items()):
        if layout is not None and id(layout) not in numbers:
            numbers[id(layout)] = len(layouts)
            regions = None if layout.regions is None else tuple(map(tuple, layout.regions))
            layouts.append([layout.splits, layout.copies, regions, layout.is_own])
        rows[name] = [dtype, list(shape), None if layout is None else numbers[id(layout)]]
    return {"keys": sorted(keys), "layouts": layouts, "tensors": rows, "others": sorted(others)}


class _Merge(Struct):
    """Facts about one name, merged so far, and the rank that they come from."""

    rank: int
    fact: tuple[Any, ...]
    copies: set[tuple[int, ...]]
    holders: dict[Region, list[int]]  # of each region, if each rank lists its own


def _merged(kinds: list[tuple[dict[str, Any], list[int]]], rank: int, world_size: int) -> HolderAgreement:
    merges: dict[str, _Merge] = {}
    keys: dict[str, list[int]] = {}
    names: set[str] = set()
    for table, ranks in kinds:
        names.update(table["tensors"], table["others"])
        for key in table["keys"]:
            keys.setdefault(key, []).extend(ranks)
        each = [(one,) for one in ranks]
        for name, (dtype, shape, number) in table["tensors"].items():
            whole = (), each, None, False
            splits, copies, regions, is_own = whole if number is None else table["layouts"][number]
            regions = None if regions is None else tuple(Region(*one) for one in regions)
            fact = (dtype, tuple(shape), splits, () if is_own else regions)
            merge = merges.setdefault(name, _Merge(ranks[0], fact, set(), {}))
            if merge.fact != fact:
                raise _disagreement(name, merge, ranks[0], fact)
            if is_own:
                listed = [Region.whole(tuple(shape))] if regions is None else regions
                for region, holder in zip(listed, copies[0], strict=True):
                    merge.holders.setdefault(region, []).append(holder)
            else:
                merge.copies.update(copies)
    for name, merge in merges.items():
        if merge.fact[-1] == ():
            _join(name, merge)
    contents = [[set(table[part]) for part in ("keys", "tensors", "others")] for table, _ in kinds]
    return HolderAgreement(
        rank,
        world_size,
        is_alike=all(one == contents[0] for one in contents),
        layouts=_shared(merges),
        keys={key: tuple(sorted(ranks)) for key, ranks in keys.items()},
        names=frozenset(names),
    )


def _join(name: str, merge: _Merge) -> None:
    """Make one layout of the regions that each rank has listed. Ranks with the same region are copies."""
    dtype, shape, splits, _ = merge.fact
    rows = sorted(merge.holders.items())
    try:
        check_regions(name, shape, [(ranks[0], region) for region, ranks in rows])
    except InvalidInput as error:
        raise InvalidInput(f"{error} Nothing was saved.", key=name, rank=error.rank) from error
    regions = tuple(region for region, _ in rows)
    merge.fact = dtype, shape, splits, None if regions == (Region.whole(shape),) else regions
    for copy in range(max((len(ranks) for _, ranks in rows), default=0)):
        merge.copies.add(tuple(ranks[copy % len(ranks)] for _, ranks in rows))


def _shared(merges: dict[str, _Merge]) -> dict[str, ShardLayout]:
    """Return the merged layouts. Equal ones are one object."""
    known: dict[ShardLayout, ShardLayout] = {}
    layouts: dict[str, ShardLayout] = {}
    for name, merge in merges.items():
        _, _, splits, regions = merge.fact
        copies = tuple(sorted(merge.copies))
        is_whole = not splits and regions is None
        own = held_by(tuple(rank for (rank,) in copies)) if is_whole else ShardLayout(splits, copies, regions)
        layouts[name] = known.setdefault(own, own)
    return layouts


def _disagreement(name: str, merge: _Merge, rank: int, fact: tuple[Any, ...]) -> InvalidInput:
    def described(fact: tuple[Any, ...]) -> str:
        dtype, shape, splits, regions = fact
        is_whole = not splits and regions is None
        split = "whole" if is_whole else f"split by {list(splits)}" if splits else "split into regions"
        return f"{dtype}{list(shape)}, {split}"

    message = (
        f"{name} is {described(merge.fact)} on rank {merge.rank} but {described(fact)} on rank {rank}. "
        "Nothing was saved. Use different keys for different tensors, or mark their object with per_rank() "
        "if every rank has its own."
    )
    return InvalidInput(message, key=name, rank=rank)


def _key_of(name: str, keys: Mapping[str, Any]) -> str | None:
    """Return the longest key that contains a name."""
    found = [key for key in keys if is_under(name, key)]
    return max(found, key=len, default=None)
