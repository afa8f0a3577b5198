"""Documents of a checkpoint from DCP's plans: catalog, index of values, part of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.adapters.dcp.target import SaveClaim
from holdfast.checkpoint.format import part, values
from holdfast.checkpoint.format.agreement import agree
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text, parse_catalog
from holdfast.checkpoint.format.layout import Shard, check_name
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.format.partitioning import EvenPartitioning, ListedPartitioning, Partitioning, Region
from holdfast.checkpoint.format.value_index import INDEX, ValueIndex
from holdfast.checkpoint.state.tensors import NAMES
from holdfast.errors import InvalidInput, Unsupported


class _Even(NamedTuple):
    """Splits of a rule, and the regions' indices in the order of its ranks."""

    splits: tuple[tuple[int, int], ...]
    order: tuple[int, ...]


class _Cell(NamedTuple):
    """Region of a tensor, and the indices of the regions that begin in it."""

    region: Region
    inside: tuple[int, ...]

    def starts(self, regions: tuple[Region, ...], dim: int) -> set[int]:
        """Return the offsets of its regions in one dimension."""
        return {regions[index].offsets[dim] for index in self.inside}


def find_rule(shape: tuple[int, ...], rows: Sequence[tuple[int, Region]]) -> Partitioning:
    """Return the partitioning of a tensor, by a rule if possible. Tensors that share a rule cost less."""
    rows = sorted(rows, key=lambda row: (row[1], row[0]))
    even = _even(shape, tuple(region for _, region in rows))
    if even is None or len({rank for rank, _ in rows}) < len(rows):  # a rule has one region for each rank
        return ListedPartitioning(tuple(rows))
    return EvenPartitioning(even.splits, tuple(rows[index][0] for index in even.order))


@lru_cache(maxsize=64)  # hundreds of layers have tensors of the same few shapes
def _even(shape: tuple[int, ...], regions: tuple[Region, ...]) -> _Even | None:
    if not all(region.is_inside(shape) for region in regions):
        return None
    return _split([_Cell(Region.whole(shape), tuple(range(len(regions))))], regions)


def _split(cells: Sequence[_Cell], regions: tuple[Region, ...]) -> _Even | None:
    """Return the splits that divide every cell into its regions, or None."""
    first, *others = cells
    if len(first.inside) == 1:
        is_whole = all(len(one.inside) == 1 and regions[one.inside[0]] == one.region for one in cells)
        return _Even((), tuple(one.inside[0] for one in cells)) if is_whole else None
    for dim, parts in _first_splits(first, regions):
        if all(_may_split(one, dim, parts, one.starts(regions, dim)) for one in others):
            chunks = [chunk for one in cells for chunk in _chunks(one, regions, dim, parts)]
            found = _split(chunks, regions)
            if found is not None:
                return _Even(((dim, parts), *found.splits), found.order)
    return None


def _first_splits(cell: _Cell, regions: tuple[Region, ...]) -> Iterator[tuple[int, int]]:
    """Yield each (dim, parts) that may be the first split, most parts first."""
    for dim in range(len(cell.region.sizes)):
        starts = cell.starts(regions, dim)
        for parts in range(len(starts), 1, -1):  # one split into many rather than many into few
            if _may_split(cell, dim, parts, starts):
                yield dim, parts


def _may_split(cell: _Cell, dim: int, parts: int, starts: set[int]) -> bool:
    """Return True if a cell may be split this way.

    Each of the parts needs a region that begins in it, and equally many regions.
    """
    start, length = cell.region.offsets[dim], cell.region.sizes[dim]
    edges = range(start, start + length, -(-length // parts)) if length else ()
    return len(cell.inside) % parts == 0 and len(edges) == parts and starts.issuperset(edges)


def _chunks(cell: _Cell, regions: tuple[Region, ...], dim: int, parts: int) -> Iterator[_Cell]:
    """Yield each part of a split cell, with the regions that begin in it."""
    region = cell.region
    size = -(-region.sizes[dim] // parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in cell.inside:
        members[(regions[index].offsets[dim] - region.offsets[dim]) // size].append(index)
    partitioning = EvenPartitioning(((dim, parts),), tuple(range(parts)))
    for number, chunk in partitioning.regions(region.sizes):
        at = tuple(a + b for a, b in zip(region.offsets, chunk.offsets, strict=True))
        yield _Cell(Region(at, chunk.sizes), tuple(members[number]))


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


def items_to_write(catalog: bytes, plan: SavePlan, rank: int) -> list[tuple[WriteItem, Shard]]:
    """Return the shards that a rank writes, in the order of the catalog."""
    planned = {(shard.name, shard.offsets): item for item, shard in planned_shards(plan)}
    items: list[tuple[WriteItem, Shard]] = []
    for shard in parse_catalog(catalog, "the catalog of this save").shards_of(rank):
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


def make_part(
    claim: SaveClaim,
    rank: int,
    catalog: bytes,
    starts: tuple[int, ...],
    file: DataFile,
    encoded: dict[str, Any],
) -> bytes:
    """Return the part document of a rank."""
    draft = part.draft(
        run=claim.run,
        step=claim.step,
        attempt=claim.attempt,
        rank=rank,
        world_size=claim.world_size,
        ancestors=claim.ancestors,
        values=encoded,
        own=(),
        starts=starts,
        catalog=catalog,
    )
    return part.finish(draft, file)
