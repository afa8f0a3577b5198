"""Composite tensors: live tensors taken apart into plain ones, and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.checkpoint.format.composites import DTENSOR, DTYPE, MAX_INNER, SPARSE, SavedTensor, raw_of
from holdfast.checkpoint.state.sharding import layout_of, local_of, reshaped_like, shard_like
from holdfast.checkpoint.state.tensors import LAYOUTS, PLAIN, RAW, SHARD_ATTRIBUTES, is_dtensor, torch_dtype
from holdfast.errors import Corrupt, Unsupported
from holdfast.system.documents import shown


def take_apart(tensor: torch.Tensor) -> SavedTensor:
    """Return the type, inner tensors and description of a composite tensor.

    The inner tensors are detached, and share its memory. The context of a class is as the class gives it.
    """
    if is_dtensor(tensor):
        return _of_dtensor(tensor)
    if all(hasattr(tensor, name) for name in SHARD_ATTRIBUTES):
        raise Unsupported(
            "its global_shape shows shards of a global tensor, but they are read only from plain tensors of "
            "safetensors' dtypes. Save a view() of it with such a dtype and these attributes, or remove them "
            "and mark it with per_rank() to restore it on the same number of ranks."
        )
    if type(tensor) not in PLAIN:
        return _of_class(tensor)
    if tensor.layout in LAYOUTS:
        return _of_sparse(tensor)
    return SavedTensor(DTYPE, {"raw": _raw(tensor)}, {"dtype": RAW[tensor.dtype]})


def put_together(saved: SavedTensor) -> Any:
    """Return a composite tensor over the memory of inner tensors, in place of references in `saved`.

    It is the live one if the inner tensors are its own, and a new one otherwise.
    If the type needs a live tensor with the same facts, and there is none, `saved` itself is returned.
    """
    apart = saved.live
    live = None if apart is None else apart.live
    if apart is not None and all(item is apart.inner[name] for name, item in saved.inner.items()):
        return live  # which has been filled
    if saved.type in SPARSE:
        return _sparse(saved)
    if saved.type == DTYPE:
        raw = saved.inner["raw"]
        if not is_dtensor(raw):
            return _from_raw(raw, saved.facts["dtype"])
        assert live is not None
        return shard_like(_from_raw(local_of(raw), saved.facts["dtype"]), live)
    if live is None:
        return saved
    if saved.type == DTENSOR:
        return shard_like(saved.inner["local"], live)
    flat: Any = live
    _, context = flat.__tensor_flatten__()
    return type(flat).__tensor_unflatten__(dict(saved.inner), context, live.shape, live.stride())


@torch.no_grad()
def set_content(live: torch.Tensor, new: torch.Tensor) -> None:
    """Make a live sparse tensor equal to a new one, which it takes over. It stays the same object."""
    if live.layout is torch.sparse_coo:
        live.data = new  # copy_() would leave out whether it is coalesced
    else:
        live.resize_as_sparse_(new)
        live.copy_(new)


def _of_class(tensor: Any) -> SavedTensor:
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if tensor.layout is not torch.strided:
        raise Unsupported(
            f"it is a {name} of layout {tensor.layout}. Save its values() and offsets() instead, and "
            "build it from these."
        )
    names, context = tensor.__tensor_flatten__()
    inner = {one: getattr(tensor, one) for one in names}
    is_complete = 0 < len(inner) <= MAX_INNER and "" not in inner
    if not is_complete or not all(isinstance(one, torch.Tensor) for one in inner.values()):
        raise Unsupported(
            f"it is a {name}, whose __tensor_flatten__() does not return the names of 1 to {MAX_INNER} "
            "tensors. Save the tensors that it is made of."
        )
    shape, detached = list(map(int, tensor.shape)), {one: each.detach() for one, each in inner.items()}
    facts = {"shape": shape, "dtype": str(tensor.dtype), "context": context}
    return SavedTensor(f"{kind.__module__}:{kind.__qualname__}", detached, facts)


def _of_dtensor(tensor: Any) -> SavedTensor:
    local = local_of(tensor)
    if type(local) in PLAIN and local.dtype in RAW and local.layout is torch.strided:
        raw = _raw(local)
        shape = (*tensor.shape, *raw.shape[local.dim() :])
        return SavedTensor(DTYPE, {"raw": reshaped_like(raw, tensor, shape)}, {"dtype": RAW[local.dtype]})
    layout = layout_of(tensor)
    assert layout is not None
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    regions = layout.regions_of(rank, tuple(tensor.shape))
    if not regions:
        raise Unsupported(
            "it is a DTensor on a mesh without this rank, over a tensor of another class. Leave it out of "
            "the state on this rank."
        )
    own = regions[0]
    facts = {"shape": list(tensor.shape), "offsets": list(own.offsets), "sizes": list(own.sizes)}
    return SavedTensor(DTENSOR, {"local": local}, facts)


def _of_sparse(tensor: torch.Tensor) -> SavedTensor:
    kind, flat = LAYOUTS[tensor.layout], tensor.detach()
    facts: dict[str, Any] = {"size": list(tensor.shape)}
    if kind == "sparse_coo":
        facts["coalesced"] = tensor.is_coalesced()
        return SavedTensor(kind, {"indices": flat._indices(), "values": flat._values()}, facts)
    return SavedTensor(kind, {name: getattr(flat, name)() for name in SPARSE[kind]}, facts)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with a stored dtype."""
    if tensor.is_conj() or tensor.is_neg():
        raise Unsupported(
            f"it is a conjugate or negative view of {tensor.dtype}. Use its resolve_conj().resolve_neg()."
        )
    flat = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(flat)
    return flat.view(torch_dtype(raw_of(RAW[tensor.dtype])[0]))


def _from_raw(raw: torch.Tensor, name: str) -> torch.Tensor:
    stored, count = raw_of(name)
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise Unsupported(
            f"A tensor is saved as torch.{name}, which torch {torch.__version__} does not have. Install a "
            "newer torch to read it."
        )
    if raw.dtype is not torch_dtype(stored) or (count > 1 and tuple(raw.shape[-1:]) != (count,)):
        raise Corrupt(f"A {name} tensor is stored as {raw.dtype} of shape {list(raw.shape)}.")
    return torch.view_as_complex(raw) if count > 1 else raw.view(dtype)


def _sparse(saved: SavedTensor) -> torch.Tensor:
    inner: Mapping[str, torch.Tensor] = saved.inner
    size = tuple(saved.facts["size"])
    try:
        if saved.type != "sparse_coo":
            layout = getattr(torch, saved.type)
            options: dict[str, Any] = {"size": size, "layout": layout, "check_invariants": True}
            return torch.sparse_compressed_tensor(*inner.values(), **options)
        options = {"is_coalesced": saved.facts["coalesced"], "check_invariants": True}
        return torch.sparse_coo_tensor(inner["indices"], inner["values"], size, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Corrupt(
            f"A {saved.type} tensor of size {shown(list(size))} cannot be made of its inner tensors: "
            f"{str(error)[:200]}."
        ) from error
