"""Bytes of a tensor in memory as a writable buffer, without numpy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, shared with it.

    Args:
        tensor: any shape and dtype; stays alive as long as the view.

    Returns:
        A writable one-dimensional view of `tensor.nbytes` unsigned bytes.

    Raises:
        ValueError: the tensor is on another device, or not contiguous.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"Only contiguous CPU tensors have such a view; got one on {tensor.device}.")
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # the memory must outlive the view
    return memoryview(array).cast("B")
