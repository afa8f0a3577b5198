"""Sharding: how a live tensor is split over ranks, read from the tensor itself without communication."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct

from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Partitioning, Region
from holdfast.checkpoint.state import tensors
from holdfast.errors import InvalidInput, Unsupported


@dataclass(frozen=True)
class ShardLayout:
    """Split of tensors over ranks, independent of their shapes. Thousands of tensors share a few."""

    splits: tuple[tuple[int, int], ...]  # (dim, parts) in the order in which they are made; parts are never 1
    copies: tuple[tuple[int, ...], ...]
    """The full sets of global ranks that together hold a tensor, each in the order of its regions."""
    regions: tuple[Region, ...] | None = None  # of a tensor split by no rule, in the order of a copy's ranks
    is_own: bool = False  # lists what this rank holds, as a tensor with shard attributes shows no more
    places: tuple[Region, ...] = field(default=(), compare=False)  # of such shards in the live tensor

    @functools.cached_property
    def partitionings(self) -> list[Partitioning]:
        """Partitionings for writing each of `copies`."""
        if self.regions is None:
            return [EvenPartitioning(self.splits, ranks) for ranks in self.copies]
        return [ListedPartitioning(tuple(zip(ranks, self.regions, strict=True))) for ranks in self.copies]

    def regions_of(self, rank: int, shape: tuple[int, ...]) -> tuple[Region, ...]:
        """Return the regions that a rank holds, perhaps empty ones."""
        indices = self._indices.get(rank, ())
        if self.regions is None:
            return tuple(self.partitionings[0].region_at(index, shape) for index in indices)
        return tuple(self.regions[index] for index in indices)

    def region_number(self, rank: int) -> int | None:
        """Return the number of the only region that a rank holds, or None."""
        indices = self._indices.get(rank, ())
        return indices[0] if len(indices) == 1 else None

    @property
    def holders(self) -> frozenset[int]:
        """All ranks that hold a region."""
        return frozenset(self._indices)

    @functools.cached_property
    def _indices(self) -> dict[int, tuple[int, ...]]:
        """Indices of the regions that each rank holds."""
        found: dict[int, tuple[int, ...]] = {}
        for index, rank in ((index, rank) for ranks in self.copies for index, rank in enumerate(ranks)):
            found[rank] = (index,) if rank not in found else tuple(sorted({*found[rank], index}))
        return found


class Sharding(Struct, frozen=True):
    """A tensor's whole shape and its layout."""

    shape: tuple[int, ...]
    layout: ShardLayout  # how it is split, and the ranks that hold it

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Return the regions that a rank holds, perhaps empty ones."""
        return self.layout.regions_of(rank, self.shape)


@functools.lru_cache(maxsize=64)
def held_by(ranks: tuple[int, ...]) -> ShardLayout:
    """Return the layout of tensors that each of these ranks holds whole."""
    return ShardLayout((), tuple((rank,) for rank in ranks))


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """Return the sharding of a tensor, or None for a plain one.

    Ranks: not collective; every rank computes the same.
    """
    layout = layout_of(tensor)
    return None if layout is None else Sharding(shape_of(tensor), layout)


def layout_of(tensor: torch.Tensor) -> ShardLayout | None:
    """Return the layout of a tensor, or None for a plain one; as `sharding_of`."""
    if type(tensor) in tensors.PLAIN:
        return _own_layout(tensor) if tensors.is_local_shard(tensor) else None
    if tensors.is_dtensor(tensor):
        spec: Any = tensor._spec  # pyright: ignore[reportAttributeAccessIssue]
        is_listed = not getattr(spec, "use_strided_shard_as_shard_order", True)
        return _mesh_layout(spec.mesh, tuple(spec.placements), spec.shard_order if is_listed else None)
    return _listed_layout(tensor) if tensors.is_sharded_tensor(tensor) else None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that `tensor` is or is a part of."""
    return tuple(map(int, tensor.global_shape)) if tensors.is_local_shard(tensor) else tuple(tensor.shape)  # pyright: ignore[reportAttributeAccessIssue]


_copies_of: dict[str, tuple[tuple[int, ...], ...]] = {}
"""By the name of a process group: all groups that hold the same shards, including itself."""


def note_copies(group: Any, copies: Sequence[Sequence[int]]) -> None:
    """Record the ranks of each group that holds the same shards as `group`. A ShardedTensor hides it."""
    _copies_of[group.group_name] = tuple(sorted(tuple(ranks) for ranks in copies))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, in the same memory, or any other tensor itself.

    Blocks: until a pending collective has filled the part.
    """
    if not tensors.is_dtensor(tensor):
        return _only_shard(tensor) if tensors.is_sharded_tensor(tensor) else tensor
    local: Any = tensor._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return local if type(local) is torch.Tensor or not tensors.is_pending(local) else local.wait()


def shards_of(tensor: torch.Tensor, rank: int) -> list[tuple[torch.Tensor, Region]]:
    """Return this rank's shards of a tensor, in the same memory, and their regions of the whole one."""
    local, sharding = local_of(tensor), sharding_of(tensor)
    if sharding is None:
        return [(local, Region.whole(tuple(local.shape)))]
    regions, layout = sharding.regions_of(rank), sharding.layout
    if not layout.is_own:
        return [(local, region) for region in regions]
    shards = [local.detach()[place.slices] for place in layout.places]
    return list(zip(shards, regions, strict=True))


def reshaped_like(local: torch.Tensor, model: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a DTensor of another whole shape, with perhaps more dimensions, over a local part."""
    return _wrap(local, model, shape, torch.empty(shape, device="meta").stride())


def shard_like(local: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the layout of `model` and the given local part."""
    if tensors.is_sharded_tensor(model):
        return _listed_like(local, model)
    stride = model._spec.tensor_meta.stride  # pyright: ignore[reportAttributeAccessIssue]
    return _wrap(tensors.laid_out_like(local, local_of(model)), model, tuple(model.shape), stride)


def parts_like(
    parts: Sequence[torch.Tensor], model: torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return a tensor with the layout of `model` and this rank's parts; padding of a plain one is zeros."""
    if not tensors.is_local_shard(model):
        (part,) = parts
        return shard_like(part, model)
    new = torch.zeros_like(model, dtype=dtype, device=device, requires_grad=False)
    vars(new).update({name: vars(model)[name] for name in tensors.SHARD_ATTRIBUTES})
    for place, part in zip(_own_layout(new).places, parts, strict=True):
        new[place.slices].copy_(part)
    return new


def make_real(
    live: torch.Tensor,
    sources: list[Callable[[], torch.Tensor]],
    device: torch.device,
    label: str,
    *,
    copy: bool,
) -> None:
    """Make a meta tensor real in place. Modules and optimizers keep the same object."""
    parts = [source().detach().to(device=device, dtype=live.dtype, copy=copy) for source in sources]
    is_part = is_divided(live) and not (
        type(live) in tensors.PLAIN and [one.shape for one in parts] == [live.shape]
    )
    real = parts_like(parts, live, live.dtype, device) if is_part else tensors.laid_out_like(parts[0], live)
    if isinstance(live, torch.nn.Parameter):
        real = torch.nn.Parameter(real, requires_grad=live.requires_grad)
    vars(real).update(vars(live))
    try:
        torch.utils.swap_tensors(live, real)
    except RuntimeError as error:
        raise InvalidInput(
            f"{label} is on the meta device and cannot be made real in place: {error} "
            "Call to_empty(device=...) on the module before you restore.",
            key=label,
        ) from error


def replicated_like(whole: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return a DTensor on the mesh of `model`, whole on every rank."""
    return _wrap(whole, model, tuple(whole.shape), whole.stride(), is_split=False)


def _wrap(
    local: torch.Tensor, model: Any, shape: tuple[int, ...], stride: tuple[int, ...], *, is_split: bool = True
) -> torch.Tensor:
    """Return a DTensor on the mesh of `model`, split as that is or whole on every rank."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    spec = model._spec
    own = tuple(spec.placements)
    placements = own if is_split else (Replicate(),) * spec.mesh.ndim
    order: dict[str, Any] = {}
    if placements == own and not getattr(spec, "use_strided_shard_as_shard_order", True):
        order = {"shard_order": spec.shard_order}
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    new = type(spec)(spec.mesh, placements, tensor_meta=meta, **order)
    kind = tensors.dtensor_class()
    return kind(local, new, requires_grad=False)


# A cached mesh costs the memory of its ranks' numbers. Equal meshes hold the same ranks.
@functools.lru_cache(maxsize=256)
def _mesh_layout(mesh: Any, placements: tuple[Any, ...], shard_order: Any) -> ShardLayout:
    sizes = tuple(mesh.mesh.shape)
    if any(placement.is_partial() for placement in placements):
        raise Unsupported(
            f"it is a DTensor with placements {list(placements)}, a pending sum. "
            "Call redistribute() to Shard or Replicate first."
        )
    order = _split_order(sizes, placements)
    if shard_order is not None:
        order = [(entry.tensor_dim, mesh_dim) for entry in shard_order for mesh_dim in entry.mesh_dims]
    if order is None:
        raise Unsupported(
            f"it is a DTensor whose placements {list(placements)} on a mesh of {sizes} do not nest. "
            "Call redistribute() to placements of Shard and Replicate first."
        )
    split_dims = [mesh_dim for _, mesh_dim in order]
    rest = [mesh_dim for mesh_dim in range(len(sizes)) if mesh_dim not in split_dims]
    ranks = mesh.mesh.permute(*rest, *split_dims) if sizes else mesh.mesh
    num_copies = math.prod(sizes[mesh_dim] for mesh_dim in rest)
    splits = tuple((dim, sizes[mesh_dim]) for dim, mesh_dim in order if sizes[mesh_dim] > 1)
    copies = sorted(tuple(copy) for copy in ranks.reshape(num_copies, -1).tolist())
    return ShardLayout(splits, tuple(copies))


def _split_order(sizes: Sequence[int], placements: Sequence[Any]) -> list[tuple[int, int]] | None:
    """Return the splits of a tensor in order, as (tensor dim, mesh dim); None if they do not nest."""
    # Mesh dims split from left to right, but a strided shard comes after those to its right that make up its
    # split factor.
    by_dim: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if placement.is_replicate():
            continue
        order = by_dim.setdefault(placement.dim, [])
        before, at = 1, 0
        factor = int(getattr(placement, "split_factor", 1))
        while before < factor and at < len(order):
            before *= sizes[order[at]]
            at += 1
        if before != factor:
            return None
        order.insert(at, mesh_dim)
    return [(dim, mesh_dim) for dim, order in sorted(by_dim.items()) for mesh_dim in order]


def is_divided(tensor: torch.Tensor) -> bool:
    """Return True if `shard_like` can give other tensors the sharding of this one."""
    return tensors.is_dtensor(tensor) or tensors.is_local_shard(tensor)


def _own_layout(tensor: Any) -> ShardLayout:
    """Return the layout of a tensor with shard attributes; it lists this rank alone."""
    try:
        shape, own_shape = shape_of(tensor), tuple(tensor.shape)
        shards = tensor.global_offsets, tensor.local_offsets, tensor.local_sizes
        rows = [
            (Region(_ints(at), _ints(sizes)), Region(_ints(inside), _ints(sizes)))
            for at, inside, sizes in zip(*shards, strict=True)
        ]
        is_sound = all(a.is_inside(shape) and b.is_inside(own_shape) for a, b in rows)
        rows = [row for row in rows if row[0].num_items or 0 in shape]
        regions, places = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
    except (TypeError, ValueError):
        is_sound, regions, places, shape = False, (), (), ()
    if not is_sound or len(set(regions)) < len(regions):
        shown = ", ".join(f"{name}={getattr(tensor, name)}" for name in sorted(tensors.SHARD_ATTRIBUTES))
        raise Unsupported(
            f"its shards ({shown}) do not lie in the global tensor and in its own shape "
            f"{list(tensor.shape)}, each once. Give one offset and one size for each dimension of each shard."
        )
    rank = torch.distributed.get_rank() if tensors.may_be_sharded() else 0
    is_whole = regions == (Region.whole(shape),)
    return ShardLayout((), ((rank,) * len(regions),), None if is_whole else regions, True, places)


def _ints(numbers: Any) -> tuple[int, ...]:
    return tuple(map(int, numbers))


def _only_shard(tensor: Any) -> torch.Tensor:
    shards = tensor.local_shards()
    if len(shards) > 1:
        raise Unsupported(
            f"it is a ShardedTensor with {len(shards)} parts on one rank. Only one is supported. "
            "Save the parts with DCP's writer of Holdfast, or use a DTensor."
        )
    if shards:
        return shards[0].tensor
    dtype = tensor.metadata().tensor_properties.dtype
    return torch.empty((0, *tuple(tensor.shape)[1:]), dtype=dtype, device="cpu")


def _listed_like(local: torch.Tensor, model: Any) -> torch.Tensor:
    sharded: Any = sys.modules["torch.distributed._shard.sharded_tensor.api"]
    facts = copy.deepcopy(model.metadata())
    facts.tensor_properties.dtype = local.dtype
    shards = [sharded.Shard(local, shard.metadata) for shard in model.local_shards()]
    group = model._process_group
    make = sharded.ShardedTensor._init_from_local_shards_and_global_metadata
    return make(shards, sharded_tensor_metadata=facts, process_group=group)


def _listed_layout(tensor: Any) -> ShardLayout:
    """Return the layout of a ShardedTensor: by the chunking rule if that fits, else region by region."""
    shape = tuple(tensor.shape)
    group = torch.distributed.get_process_group_ranks(tensor._process_group)
    held: dict[int, Region] = {}
    for shard in tensor.metadata().shards_metadata:
        held[shard.placement.rank()] = Region(tuple(shard.shard_offsets), tuple(shard.shard_sizes))
    copies = _copies_of.get(tensor._process_group.group_name, (tuple(group),))
    if len(group) == 1 and shape == next(iter(held.values()), Region.whole(shape)).sizes:
        return ShardLayout((), copies)
    for ranks in (tuple(group), tuple(range(len(group)))):  # numbered globally, or within their group
        for dim in range(len(shape)):
            rule = EvenPartitioning(((dim, len(ranks)),), ranks)
            if {rank: region for rank, region in rule.regions(shape) if region.num_items} == {
                rank: region for rank, region in held.items() if region.num_items
            }:
                return _chunked(dim, copies)
    ranks = tuple(sorted(held))
    return ShardLayout((), (ranks,), tuple(held[rank] for rank in ranks))


@functools.lru_cache(maxsize=64)
def _chunked(dim: int, copies: tuple[tuple[int, ...], ...]) -> ShardLayout:
    return ShardLayout(((dim, len(copies[0])),), copies)
