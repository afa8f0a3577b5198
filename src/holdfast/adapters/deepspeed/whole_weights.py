"""Whole weights of a checkpoint of ZeRO 3, for a load without the optimizer's state."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed.runtime.engine as stock
import torch

from holdfast.adapters.deepspeed.resharding import split_each
from holdfast.adapters.deepspeed.saved_files import SavedFiles

_NAME = "get_fp32_state_dict_from_zero_checkpoint"
"""Function by which DeepSpeed's engine reads the weights from its files."""


@contextlib.contextmanager
def returning_weights(files: SavedFiles) -> Iterator[None]:
    """Have DeepSpeed's engine take whole weights from a checkpoint instead of its own files."""
    original = getattr(stock, _NAME)
    setattr(stock, _NAME, lambda folder: merge_weights(files))
    try:
        yield
    finally:
        setattr(stock, _NAME, original)


def merge_weights(files: SavedFiles) -> dict[str, torch.Tensor]:
    """Return the whole weights in full precision, and the buffers.

    Raises:
        HoldfastError: as `SavedFiles.load`.
    """
    models = [files.load(name) for name in _names(files, "_model_states.pt")]
    flats = [_flat(files.load(name)) for name in _names(files, "_optim_states.pt")]
    first = models[0]
    buffers = set(first["buffer_names"])
    made = {name: value for name, value in first["module"].items() if name in buffers}
    shapes = {name: shape for group in first["param_shapes"] for name, shape in group.items()}
    made |= _merge(flats, shapes)
    frozen: Mapping[str, Sequence[int]] = first.get("frozen_param_shapes") or {}
    for name, shape in frozen.items():
        made |= _merge([model["frozen_param_fragments"][name].flatten() for model in models], {name: shape})
    return made | {name: made[other] for name, other in first["shared_params"].items() if other in made}


def _names(files: SavedFiles, end: str) -> list[str]:
    """Return the names of the files with this suffix, ordered by rank."""
    return sorted((name for name in files.owners if name.endswith(end)), key=lambda name: files.owners[name])


def _flat(content: Mapping[str, Any]) -> torch.Tensor:
    groups: Iterable[torch.Tensor] = content["optimizer_state_dict"]["fp32_flat_groups"]
    return torch.cat([one.detach().flatten() for one in groups])


def _merge(parts: Sequence[torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    whole = split_each(parts, sizes, rank=0, world_size=1).split(sizes)
    return {name: one.view(tuple(shape)) for (name, shape), one in zip(shapes.items(), whole, strict=True)}
