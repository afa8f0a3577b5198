"""Tensors that a checkpoint can hold: their kinds and dtypes, their views, and the memory that they fill."""

from __future__ import annotations

import bisect
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.checkpoint.format.composites import RAW_DTYPES, SPARSE
from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.errors import Unsupported
from holdfast.system.linux.memory_mappings import read_mappings

PLAIN = (torch.Tensor, torch.nn.Parameter)
_get_version = operator.attrgetter("_version")
_is_set_to = torch.Tensor.is_set_to
_TENSOR, _PARAMETER, _STRIDED = torch.Tensor, torch.nn.Parameter, torch.strided

SHARD_ATTRIBUTES = frozenset(("global_offsets", "global_shape", "local_offsets", "local_sizes"))
_TORCH = {name: getattr(torch, label) for name, label in TORCH_NAMES.items() if hasattr(torch, label)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH.items()}
"""safetensors dtype name by torch dtype."""
RAW: dict[torch.dtype, str] = {getattr(torch, name): name for name in RAW_DTYPES if hasattr(torch, name)}
"""Name of a dtype that safetensors files do not have, by torch dtype."""
LAYOUTS: dict[torch.layout, str] = {getattr(torch, name): name for name in SPARSE}
"""Name of a sparse layout, by torch layout."""
_PENDING = "AsyncCollectiveTensor"  # by name, to avoid an import


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype."""
    if dtype not in NAMES:
        raise Unsupported(
            f"Tensors of {dtype} cannot be saved: the safetensors format does not support it. Save a "
            "view() of it with another dtype."
        )
    return NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name."""
    if name not in _TORCH:
        known = f" (torch.{TORCH_NAMES[name]})" if name in TORCH_NAMES else ""
        raise Unsupported(
            f"A tensor is saved as {name}{known}, which torch {torch.__version__} does "
            "not have. It was not read. Install a newer torch to read it."
        )
    return _TORCH[name]


def is_dtensor(tensor: object) -> bool:
    """Return True for a DTensor."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def dtensor_class() -> Any:
    """Return the class, or None as long as nothing has imported it: then no DTensor exists."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def may_be_sharded() -> bool:
    """Return True if this process can have a DTensor."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_sharded_tensor(tensor: object) -> bool:
    """Return True for a ShardedTensor, which FSDP1 makes."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def is_pending(tensor: object) -> bool:
    """Return True for a tensor that a collective is still filling."""
    return type(tensor).__name__ == _PENDING


def is_composite(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that is saved as other tensors."""
    kind = type(tensor)
    if kind in PLAIN:
        is_plain = tensor.layout is _STRIDED and tensor.dtype in NAMES
        return not is_plain and (tensor.layout in LAYOUTS or tensor.dtype in RAW)
    if is_dtensor(tensor):
        local: Any = tensor._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
        return not is_pending(local) and is_composite(local)
    return not is_pending(tensor) and not is_sharded_tensor(tensor) and is_traceable_wrapper_subclass(tensor)


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor with one of torch's sparse layouts."""
    return type(tensor) in PLAIN and tensor.layout in LAYOUTS


def is_savable(tensor: torch.Tensor) -> bool:
    """Return True if a checkpoint can hold a tensor's bytes as they are."""
    kind = type(tensor)
    return (
        (kind is _TENSOR or kind is _PARAMETER)
        and tensor.dtype in NAMES
        and tensor.layout is _STRIDED
        and not tensor.is_meta
        and not tensor.is_nested
    )


def is_local_shard(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor whose attributes describe its shards of a global tensor.

    Source: `torch.distributed.checkpoint.CheckpointableTensor` of torch 2.14.
    """
    facts = tensor.__dict__
    return "global_shape" in facts and type(tensor) in PLAIN and facts.keys() >= SHARD_ATTRIBUTES


def unsavable(tensor: torch.Tensor, name: str, why: str | None = None) -> Unsupported:
    """Return the error for a tensor that cannot be saved."""
    return Unsupported(f"{name} cannot be saved: {why or _why_not(tensor)} Nothing was written.", key=name)


def unfillable(tensor: torch.Tensor, name: str, why: str | None = None) -> Unsupported:
    """Return the error for a live tensor that cannot be restored into."""
    return Unsupported(f"{name} cannot be restored: {why or _why_not(tensor)} Nothing was changed.", key=name)


def _why_not(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialized yet. Run the lazy module once on an input first."
    if tensor.is_nested:
        return "it is a nested tensor. Save its values() and offsets() instead, or its unbind()."
    if kind not in PLAIN:
        return (
            f"it is a {kind.__module__}.{kind.__qualname__}, not a plain tensor or parameter. Save its "
            "as_subclass(torch.Tensor), or give the class __tensor_flatten__() and __tensor_unflatten__()."
        )
    if tensor.is_quantized:
        return (
            f"torch stores a scale beside {tensor.dtype}, which is deprecated. Save its int_repr() with "
            "q_scale() and q_zero_point(), or quantize with torchao."
        )
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}. Save its to_dense()."
    if tensor.device.type == "meta":
        return "it is on the meta device and has no bytes. Restore into it, or initialize it."
    return f"the safetensors format does not support {tensor.dtype}. Save a view() of it with another dtype."


def is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors at the same address show the same elements alike."""
    is_alike = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
    return is_alike and (a.stride(), a.is_conj(), a.is_neg()) == (b.stride(), b.is_conj(), b.is_neg())


def shows_same_memory(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """Return True if a tensor has the storage, offset, shape, strides and dtype of `alias`."""
    return (
        tensor.dtype is alias.dtype
        and show_same_memory([tensor], [alias])
        and tensor.is_conj() == alias.is_conj()
        and tensor.is_neg() == alias.is_neg()
    )


def show_same_memory(tensors: list[torch.Tensor], aliases: list[torch.Tensor]) -> bool:
    """Return True if each tensor has the storage, offset, shape and strides of its alias.

    Enough for tensors of the same dtype that are whole storages: see `may_be_reread`.
    """
    try:
        return all(map(_is_set_to, tensors, aliases))
    except RuntimeError:  # a sparse tensor has replaced a dense one
        return False


def may_be_reread(tensor: torch.Tensor) -> bool:
    """Return True if the memory could also be shown as a conjugate or negative view.

    A negative view is every second number of a complex tensor, so it is never a whole storage.
    """
    return tensor.is_complex() or tensor.untyped_storage().nbytes() != tensor.nbytes


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return PyTorch's counters of writes. Tensors made in inference mode have none, and count as 0."""
    tensors = list(tensors)
    try:
        return list(map(_get_version, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return True if writing a tensor's bytes in sequence into its memory fills it."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def laid_out_like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of `empty_like(model)`, if the shapes are equal."""
    # Optimizers make their state in this way, and their fused kernels go through the memory of a parameter,
    # its gradient and its state without looking at strides.
    if tensor.shape != model.shape or (tensor.is_contiguous() and model.is_contiguous()):
        return tensor
    if torch.empty_like(model, device="meta").stride() == tensor.stride():
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@torch.no_grad()
def copy(source: torch.Tensor, live: torch.Tensor) -> None:
    """Copy values into a live tensor, in its dtype. A tensor with overlapping elements gets new memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(live.shape, live.stride(), strict=True)):
        live.data = source.to(device=live.device, dtype=live.dtype, copy=True)
    else:
        live.detach().copy_(source)


Range = tuple[int, int]  # first address, and the one after the last


class FilledMemory:
    """Ranges of addresses that are or will be filled, disjoint and in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add a range."""
        first, last = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def overlap(self, start: int, stop: int) -> list[Range]:
        """Return the parts of a range that were added before."""
        first, last = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        found = zip(self._starts[first:last], self._stops[first:last], strict=True)
        return [(max(start, low), min(stop, high)) for low, high in found]


def range_of(tensor: torch.Tensor) -> Range | None:
    """Return the addresses of a tensor; None if it does not fill a range of them with its own bytes."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        return None  # a copy has other strides if elements overlap or have gaps between them
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def holds(live: torch.Tensor, new: torch.Tensor, ranges: Sequence[Range]) -> bool:
    """Return True if a tensor has the bytes of another one at some addresses."""
    start = live.data_ptr()
    new = laid_out_like(new.to(device=live.device, dtype=live.dtype), live)
    here, there = _bytes(live), _bytes(new)
    return all(torch.equal(here[a - start : b - start], there[a - start : b - start]) for a, b in ranges)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_MAX_NAMED = 5


def find_read_only(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors in memory that this process cannot write to.

    Blocks: 1 ms per 1000 mappings of the process.
    """
    if sys.platform != "linux":
        return []  # readers of checkpoints may run there
    ranges = [(start, stop) for start, stop, _ in read_mappings(lambda access: b"w" not in access)]
    stops = [stop for _, stop in ranges]
    found: list[str] = []
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        last = sum(map(operator.mul, tensor.shape, tensor.stride())) - sum(tensor.stride())
        start = tensor.data_ptr()
        stop, at = start + (last + 1) * tensor.element_size(), bisect.bisect_right(stops, start)
        if at < len(ranges) and ranges[at][0] < stop:
            found.append(name)
    return found


def described_read_only(names: Sequence[str]) -> str:
    """Return the beginning of a sentence about the tensors of `find_read_only`."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    listed = f"{', '.join(names[:_MAX_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"
    return f'{listed} in memory that is mapped read-only, such as that of np.load(mmap_mode="r")'
