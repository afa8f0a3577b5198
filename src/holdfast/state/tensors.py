"""What a tensor must be to stand in a checkpoint, and its dtype's name there."""

from __future__ import annotations

import torch

from holdfast.errors import Unsupported
from holdfast.format.dtypes import TORCH_NAMES

_TORCH = {name: getattr(torch, label) for name, label in TORCH_NAMES.items() if hasattr(torch, label)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH.items()}
"""safetensors dtype name by torch dtype."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_set_to = torch.Tensor.is_set_to
_TENSOR, _PARAMETER, _STRIDED = torch.Tensor, torch.nn.Parameter, torch.strided


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype.

    Raises:
        Unsupported: safetensors has no such dtype.
    """
    if dtype not in NAMES:
        raise Unsupported(f"Tensors of {dtype} cannot be saved: the safetensors format has no such dtype.")
    return NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name.

    Raises:
        Unsupported: this torch has no such dtype.
    """
    if name not in _TORCH:
        known = f" (torch.{TORCH_NAMES[name]})" if name in TORCH_NAMES else ""
        raise Unsupported(
            f"A tensor is saved as {name}{known}, which torch {torch.__version__} does "
            "not have. It was not read. Install a newer torch to read it."
        )
    return _TORCH[name]


def is_savable(tensor: torch.Tensor) -> bool:
    """True if a tensor's bytes can stand in a checkpoint as they are."""
    kind = type(tensor)
    return (
        (kind is _TENSOR or kind is _PARAMETER)
        and tensor.dtype in NAMES
        and tensor.layout is _STRIDED
        and not tensor.is_meta
    )


def refuse(tensor: torch.Tensor, name: str, why: str | None = None) -> Unsupported:
    """The error that says why a tensor is not savable."""
    return Unsupported(f"{name} cannot be saved: {why or _why_not(tensor)} Nothing was written.", key=name)


def refuse_to_fill(tensor: torch.Tensor, name: str, why: str | None = None) -> Unsupported:
    """The error that says why a live tensor cannot be restored into."""
    return Unsupported(f"{name} cannot be restored: {why or _why_not(tensor)} Nothing was changed.", key=name)


def _why_not(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialized yet; run the lazy module once on an input first."
    if kind not in PLAIN:
        return f"it is a {kind.__module__}.{kind.__qualname__}, not a plain tensor or parameter."
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be saved (see Tensor.to_dense())."
    if tensor.device.type == "meta":
        return "it is on the meta device and has no bytes; restore into it or initialize it."
    return f"the safetensors format has no dtype for {tensor.dtype}."


def is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors that start at the same address show the same elements in the same way."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def shows_same_memory(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """True if a tensor has the storage, offset, shape, strides and dtype of another one."""
    return (
        tensor.dtype is alias.dtype
        and show_same_memory([tensor], [alias])
        and tensor.is_conj() == alias.is_conj()
        and tensor.is_neg() == alias.is_neg()
    )


def show_same_memory(tensors: list[torch.Tensor], aliases: list[torch.Tensor]) -> bool:
    """True if each of many tensors has the storage, offset, shape and strides of its alias.

    Enough for tensors of the same dtype that are whole storages: see `may_be_reread`.
    """
    try:
        return all(map(_is_set_to, tensors, aliases))
    except RuntimeError:  # a sparse tensor has come to stand in the place of a dense one
        return False


def may_be_reread(tensor: torch.Tensor) -> bool:
    """True if the same memory could be shown with other values: as a conjugate or negative view.

    A negative view is one of every second number of a complex tensor, so it is never a whole storage.
    """
    return tensor.is_complex() or tensor.untyped_storage().nbytes() != tensor.nbytes


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """True if writing a tensor's bytes one after another into its memory fills it."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


@torch.no_grad()
def copy(source: torch.Tensor, live: torch.Tensor) -> None:
    """Copy values into a live tensor, with its own dtype; one with overlapping elements gets new memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(live.shape, live.stride(), strict=True)):
        live.data = source.to(device=live.device, dtype=live.dtype, copy=True)
    else:
        live.detach().copy_(source)
