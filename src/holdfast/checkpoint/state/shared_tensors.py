"""Shared tensors: tensors of the state that several ranks hold."""

from __future__ import annotations

import math

from holdfast.checkpoint.copies import SharedTensor
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.state.capture import CapturedState
from holdfast.checkpoint.state.sharding import ShardLayout
from holdfast.checkpoint.state.tensors import NAMES


def shared_tensors(captured: CapturedState, catalog: Catalog, rank: int) -> list[SharedTensor]:
    """Return the regions of tensors on this rank that other ranks hold too.

    Ranks: not collective; ranks that hold the same tensors find the same names.
    """
    numbers = {name: number for number, name in enumerate(catalog.tensors)}
    found: list[SharedTensor] = []
    for name, one in captured.shardings.items():
        layout = captured.lowest.get(name, one.layout)
        region, num_bytes = layout.region_number(rank), _bytes_of(captured, name, layout)
        if len(layout.copies) > 1 and region is not None and num_bytes and name in numbers:
            is_trained = name in captured.owned
            found.append(SharedTensor(name, numbers[name], region, layout.copies, num_bytes, is_trained))
    return found


def _bytes_of(captured: CapturedState, name: str, layout: ShardLayout) -> int:
    item_bytes = ITEM_BYTES[NAMES[captured.tensors[name].dtype]]
    return -(-math.prod(captured.shardings[name].shape) // len(layout.copies[0])) * item_bytes
