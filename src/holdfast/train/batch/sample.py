"""Batches of any size made of one that the user has: cut or repeated along the first dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree

from holdfast.errors import InvalidInput


def batch_size_of(sample: Any) -> int:
    """Samples in a batch: the length of the first dimension of its tensors.

    Raises:
        InvalidInput: it has no tensors, or they differ in their first dimension.
    """
    sizes = {leaf.shape[0] for leaf in tensors_of(sample) if leaf.dim() > 0}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidInput(
            f"The sample batch's tensors have first dimensions of {sorted(sizes) or 'no length'}, so it "
            "cannot be cut or repeated to other sizes. Give make=, a function from a size to a batch."
        )
    return sizes.pop()


def resize(sample: Any, size: int) -> Any:
    """The same batch with `size` samples: its first ones, or all of them several times over.

    Tensors without dimensions and what is no tensor stay as they are.
    """
    tensors = [leaf for leaf in tensors_of(sample) if leaf.dim() > 0]
    index = torch.arange(size, device=tensors[0].device) % tensors[0].shape[0]

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        return leaf.detach()[index.to(leaf.device)]

    return _pytree.tree_map(one, _plain(sample))


def tensors_of(sample: Any) -> list[torch.Tensor]:
    """All tensors of a batch."""
    return [leaf for leaf in _pytree.tree_leaves(_plain(sample)) if isinstance(leaf, torch.Tensor)]


def _plain(sample: Any) -> Any:
    """Batches of tokenizers are mappings that pytree does not know."""
    return dict(sample) if isinstance(sample, Mapping) and type(sample) is not dict else sample
