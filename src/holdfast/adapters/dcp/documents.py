"""Documents of a checkpoint from DCP's plans: catalog, index of values, part of a rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.adapters.dcp.target import SaveClaim
from holdfast.checkpoint.format import part, values
from holdfast.checkpoint.format.agreement import agree
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text, parse_catalog
from holdfast.checkpoint.format.layout import (
    EvenPartitioning,
    ListedPartitioning,
    Partitioning,
    Region,
    Shard,
    check_name,
)
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.format.value_index import INDEX, ValueIndex
from holdfast.checkpoint.state.tensors import NAMES
from holdfast.errors import InvalidInput, Unsupported

_MAX_TRIES = 1000
"""Sequences of splits that are tried for a rule. Meshes of a training need a few."""


def find_rule(shape: tuple[int, ...], rows: Sequence[tuple[int, Region]]) -> Partitioning:
    """Return the partitioning of (rank, region) pairs, by a rule if possible: tensors share it then."""
    rows = sorted(rows, key=lambda row: (row[1], row[0]))
    regions = tuple(region for _, region in rows)
    has_one_each = len({rank for rank, _ in rows}) == len(rows) == len(set(regions))
    even = _even(shape, regions) if has_one_each else None
    if even is None:
        return ListedPartitioning(tuple(rows))
    return EvenPartitioning(even.splits, tuple(rows[number][0] for number in even.ranks))


@lru_cache(maxsize=64)  # hundreds of layers have tensors of the same few shapes
def _even(shape: tuple[int, ...], regions: tuple[Region, ...]) -> EvenPartitioning | None:
    """Return the rule of some regions, with their numbers as ranks; None if they do not follow a rule."""
    numbers = {region: number for number, region in enumerate(regions)}
    starts = [{region.offsets[dim] for region in regions} for dim in range(len(shape))]
    tries = itertools.count()

    def search(splits: tuple[tuple[int, int], ...]) -> EvenPartitioning | None:
        if next(tries) >= _MAX_TRIES:
            return None  # it is listed
        count = math.prod(parts for _, parts in splits)
        found = [region for _, region in EvenPartitioning(splits, tuple(range(count))).regions(shape)]
        if count == len(regions):
            is_same = numbers.keys() == set(found)
            return EvenPartitioning(splits, tuple(numbers[one] for one in found)) if is_same else None
        if not all(at in starts[dim] for one in found for dim, at in enumerate(one.offsets)):
            return None  # whatever divides these regions further, they begin where none of the wanted does
        for dim, known in enumerate(starts):
            most = len(known) // math.prod(parts for which, parts in splits if which == dim)
            for parts in range(most, 1, -1):  # one split into many rather than many into few
                if len(regions) % (count * parts) == 0 and (rule := search((*splits, (dim, parts)))):
                    return rule
        return None

    return search(())


def index_values(plans: Sequence[SavePlan]) -> ValueIndex:
    """Return the index of the values in all ranks' plans."""
    ranks: dict[str, int] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for rank, plan in enumerate(plans):
        paths_of_plan = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                ranks.setdefault(name, rank)
            path = tuple(paths_of_plan.get(name, (name,)))
            if path != tuple(name.split(".")):
                paths.setdefault(name, path)
    return ValueIndex(ranks, paths)


def make_catalog(plans: Sequence[SavePlan]) -> bytes:
    """Return the catalog that the parts of all ranks share."""
    found: dict[str, tuple[Shard, list[tuple[int, Region]]]] = {}
    for rank, plan in enumerate(plans):
        for _, shard in planned_shards(plan):
            first, rows = found.setdefault(shard.name, (shard, []))
            _check_same_tensor(first, rows, shard, rank)
            rows.append((rank, Region(shard.offsets, shard.sizes)))
    tensors: dict[str, Tensor] = {}
    for name, (shard, rows) in found.items():
        partitioning = find_rule(shard.shape, rows)
        holders = tuple(sorted({rank for rank, _ in rows}))
        tensors[name] = Tensor(shard.dtype, shard.shape, partitioning, holders)
    text = catalog_text(Catalog(tensors, {}))
    try:
        agree((text,), (0,) * len(plans))
    except InvalidInput as error:
        raise InvalidInput(f"{error} Nothing was written.", rank=error.rank, key=error.key) from error
    return text


def _check_same_tensor(first: Shard, rows: Sequence[tuple[int, Region]], shard: Shard, rank: int) -> None:
    if (first.dtype, first.shape) != (shard.dtype, shard.shape):
        raise InvalidInput(
            f"Ranks have different tensors {shard.name}: rank {rows[0][0]} has "
            f"{first.dtype}{list(first.shape)}, rank {rank} has {shard.dtype}{list(shard.shape)}. Nothing "
            "was written.",
            rank=rank,
            key=shard.name,
        )


def items_to_write(claim: SaveClaim, plan: SavePlan) -> list[tuple[WriteItem, Shard]]:
    """Return the shards that a rank writes, in the order of the catalog."""
    rank = claim.writer.rank
    planned = {(shard.name, shard.offsets): item for item, shard in planned_shards(plan)}
    items: list[tuple[WriteItem, Shard]] = []
    for shard in parse_catalog(claim.catalog, "the catalog of this save").shards_of(rank):
        item = planned.get((shard.name, shard.offsets))
        if item is None:
            raise Unsupported(
                f"Rank {rank} should write {shard.name} at {list(shard.offsets)}, but its planner's "
                "finish_plan() has dropped it. The save was cancelled. The planner must return the plan that "
                "it receives.",
                rank=rank,
                key=shard.name,
            )
        items.append((item, shard))
    return items


def planned_shards(plan: SavePlan) -> list[tuple[WriteItem, Shard]]:
    """Return the tensors that a rank is to write. Empty shards of tensors with elements are left out."""
    found: list[tuple[WriteItem, Shard]] = []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            continue
        shard = _shard(item)
        check_name(shard.name)
        if not shard.num_bytes and 0 not in shard.shape:
            continue
        found.append((item, shard))
    return found


def _shard(item: WriteItem) -> Shard:
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    dtype = NAMES.get(data.properties.dtype)
    if dtype is None:
        raise Unsupported(
            f"{name} cannot be saved: the safetensors format has no dtype for {data.properties.dtype}. "
            "Nothing was written.",
            key=name,
        )
    return Shard(name, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def encode_values(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """Return the values that a rank writes, as tagged JSON."""
    encoded: dict[str, Any] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            continue
        name = item.index.fqn
        if name == INDEX:
            raise InvalidInput(
                f"The key {INDEX!r} is reserved by the checkpoint format. Rename it.", key=name
            )
        look_up = getattr(planner, "lookup_object", None)
        if look_up is None:
            raise Unsupported(
                f"{name} is not a tensor, and {type(planner).__name__} returns it only as a pickle, which is "
                "never saved. Use DefaultSavePlanner or a subclass of it.",
                key=name,
            )
        encoded[name] = values.encode(look_up(item.index), name)
    return encoded


def make_part(claim: SaveClaim, starts: tuple[int, ...], file: DataFile, encoded: dict[str, Any]) -> bytes:
    """Return the part document of a rank."""
    draft = part.draft(
        **asdict(claim.writer),
        step=claim.step,
        ancestors=claim.ancestors,
        values=encoded,
        own=(),
        starts=starts,
        catalog=claim.catalog,
    )
    return part.finish(draft, file)
