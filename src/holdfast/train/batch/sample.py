"""Batches of any size, cut or repeated from one given batch along the first dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree

from holdfast.errors import InvalidInput


def batch_size_of(sample: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its tensors.

    Raises:
        InvalidInput: the batch has no tensors, or their first dimensions differ.
    """
    sizes = {leaf.shape[0] for leaf in tensors_of(sample) if leaf.dim() > 0}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidInput(
            f"The sample batch's tensors have first dimensions of {sorted(sizes) or 'no length'}, so it "
            "cannot be cut or repeated to other sizes. Pass make_batch=, a function from a size to a batch."
        )
    return sizes.pop()


def resize(sample: Any, size: int) -> Any:
    """Return the batch with `size` samples: its first ones, or all of them repeated.

    Scalars and other objects are unchanged.
    """
    tensors = [leaf for leaf in tensors_of(sample) if leaf.dim() > 0]
    index = torch.arange(size, device=tensors[0].device) % tensors[0].shape[0]

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        return leaf.detach()[index.to(leaf.device)]

    return _pytree.tree_map(one, _plain(sample))


def tensors_of(sample: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch."""
    return [leaf for leaf in _pytree.tree_leaves(_plain(sample)) if isinstance(leaf, torch.Tensor)]


def _plain(sample: Any) -> Any:
    """Return a batch as a type that pytree supports. Tokenizers return mappings that it does not."""
    return dict(sample) if isinstance(sample, Mapping) and type(sample) is not dict else sample
