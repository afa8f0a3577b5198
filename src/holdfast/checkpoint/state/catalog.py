"""Catalog of a captured state: the tensors that this rank holds, and the rank that writes each region."""

from __future__ import annotations

import math

from holdfast.checkpoint.format.catalog import Catalog, Tensor
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.state.assignment import assign
from holdfast.checkpoint.state.capture import CapturedState
from holdfast.checkpoint.state.torch_dtypes import NAMES


def catalog_of(captured: CapturedState) -> Catalog:
    """Return the catalog of a captured state, without per-rank tensors.

    Ranks: not collective; ranks that hold the same tensors compute the same catalog, byte for byte.
    """
    shardings = captured.shardings
    dtypes = {name: NAMES[captured.tensors[name].dtype] for name in shardings}
    sizes = {name: math.prod(one.shape) * ITEM_BYTES[dtypes[name]] for name, one in shardings.items()}
    chosen = assign(sizes, shardings)
    held_by: dict[int, tuple[int, ...]] = {}  # by id of a layout: thousands of tensors share a few
    for one in shardings.values():
        if id(one.layout) not in held_by:
            held_by[id(one.layout)] = tuple(sorted(one.holders))
    tensors = {
        name: Tensor(dtypes[name], one.shape, chosen[name], held_by[id(one.layout)], name in captured.frozen)
        for name, one in shardings.items()
    }
    return Catalog(tensors, dict(captured.tied))
