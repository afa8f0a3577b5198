"""Catalog of a captured state: which rank writes each tensor, and which tensors other ranks hold too."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from holdfast.checkpoint.copies import SharedTensor
from holdfast.checkpoint.format.catalog import Catalog, Tensor
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Partitioning
from holdfast.checkpoint.state.sharding import Sharding, ShardLayout
from holdfast.checkpoint.state.tensor_table import CapturedState
from holdfast.checkpoint.state.tensors import NAMES


def assign(sizes: Mapping[str, int], shardings: Mapping[str, Sharding]) -> dict[str, Partitioning]:
    """Choose which copy of each tensor is written, so that ranks write evenly by bytes.

    Tensors whose copies are the same sets of ranks are distributed over these copies: the largest first, each
    to the copy with the fewest bytes so far. Names and the order of copies break ties, so the order of the
    mappings does not matter. A rank that also holds other tensors computes the same result for these. `sizes`
    are the bytes of each whole tensor. Equal partitionings are the same object.

    Ranks: not collective; every rank computes the same from the same arguments.
    Source: longest-processing-time-first scheduling, R. L. Graham, 1969.
    """
    by_layout: dict[int, list[tuple[str, ShardLayout]]] = {}
    for name, sharding in shardings.items():
        by_layout.setdefault(id(sharding.layout), []).append((name, sharding.layout))
    groups: dict[tuple[tuple[int, ...], ...], list[tuple[str, ShardLayout]]] = {}
    for members in by_layout.values():  # few: hashing a thousand ranks for each tensor would take long
        groups.setdefault(members[0][1].copies, []).extend(members)
    partitionings: dict[str, Partitioning] = {}
    for copies, members in groups.items():
        loads = [(0, copy) for copy in range(len(copies))]
        for name, layout in sorted(members, key=lambda member: (-sizes[member[0]], member[0])):
            num_bytes, copy = loads[0]
            partitionings[name] = layout.partitionings[copy]
            heapq.heapreplace(loads, (num_bytes + sizes[name], copy))
    return partitionings


def catalog_of(captured: CapturedState) -> Catalog:
    """Return the catalog of a captured state, without per-rank tensors.

    Ranks: not collective; ranks that hold the same tensors compute the same catalog, byte for byte.
    """
    structure, shardings = captured.structure, captured.structure.shardings
    dtypes = {name: NAMES[captured.tensors[name].dtype] for name in shardings}
    sizes = {name: math.prod(one.shape) * ITEM_BYTES[dtypes[name]] for name, one in shardings.items()}
    chosen = assign(sizes, shardings)
    layouts = {id(one.layout): one.layout for one in shardings.values()}  # thousands of tensors share a few
    held_by = {number: tuple(sorted(layout.holders)) for number, layout in layouts.items()}
    tensors = {
        name: Tensor(dtypes[name], one.shape, chosen[name], held_by[id(one.layout)], name in structure.frozen)
        for name, one in shardings.items()
    }
    return Catalog(tensors, dict(structure.tied))


def shared_tensors(captured: CapturedState, catalog: Catalog, rank: int) -> list[SharedTensor]:
    """Return the regions of tensors on this rank that other ranks hold too.

    Ranks: not collective; ranks that hold the same tensors find the same names.
    """
    numbers = {name: number for number, name in enumerate(catalog.tensors)}
    structure, found = captured.structure, list[SharedTensor]()
    for name, sharding in structure.shardings.items():
        layout = structure.lowest.get(name, sharding.layout)
        region, item_bytes = layout.region_number(rank), ITEM_BYTES[NAMES[captured.tensors[name].dtype]]
        num_bytes = -(-math.prod(sharding.shape) // len(layout.copies[0])) * item_bytes
        if len(layout.copies) > 1 and region is not None and num_bytes and name in numbers:
            is_trained = name in structure.owned
            found.append(SharedTensor(name, numbers[name], region, layout.copies, num_bytes, is_trained))
    return found
