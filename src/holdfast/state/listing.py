"""The catalog of a captured state: what this rank holds, and who writes which box of it."""

from __future__ import annotations

from holdfast.format.catalog import Catalog, Tensor
from holdfast.format.cuts import whole
from holdfast.state.assignment import assign
from holdfast.state.capture import Captured
from holdfast.state.tensors import NAMES


def catalog_of(captured: Captured, world_size: int) -> Catalog:
    """The catalog of what this rank holds, its own tensors left out."""
    sizes = {name: tensor.nbytes for name, tensor in captured.tensors.items()}
    writers = assign(sizes, captured.per_rank, captured.lowest, world_size=world_size)
    cuts = [whole(rank) for rank in range(world_size)]
    every = tuple(range(world_size))
    tensors = {
        name: Tensor(
            NAMES[captured.tensors[name].dtype], tuple(captured.tensors[name].shape), cuts[rank], every
        )
        for name, rank in writers.items()
    }
    return Catalog(tensors, captured.tied)
