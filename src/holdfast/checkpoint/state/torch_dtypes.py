"""Torch dtypes by their names in a checkpoint, which are those of safetensors."""

from __future__ import annotations

import torch

from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.errors import Unsupported

_TORCH = {name: getattr(torch, label) for name, label in TORCH_NAMES.items() if hasattr(torch, label)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH.items()}
"""safetensors dtype name by torch dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype.

    Raises:
        Unsupported: safetensors does not have this dtype.
    """
    if dtype not in NAMES:
        raise Unsupported(
            f"Tensors of {dtype} cannot be saved: the safetensors format does not support it. Save a "
            "view() of it with another dtype."
        )
    return NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name.

    Raises:
        Unsupported: this torch does not have the dtype.
    """
    if name not in _TORCH:
        known = f" (torch.{TORCH_NAMES[name]})" if name in TORCH_NAMES else ""
        raise Unsupported(
            f"A tensor is saved as {name}{known}, which torch {torch.__version__} does "
            "not have. It was not read. Install a newer torch to read it."
        )
    return _TORCH[name]
