"""Fill of torch tensors, and by a reader of live objects, with verified bytes of a checkpoint."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from msgspec import Struct

from holdfast.checkpoint.format.layout import FillTarget, Region, contiguous_cover, is_contiguous, item_offset
from holdfast.checkpoint.restore.parts import Located, Parts
from holdfast.checkpoint.restore.read import FileRead, ReadStats, Sink, Want, read
from holdfast.checkpoint.state import Load, State
from holdfast.checkpoint.state.load import renamer
from holdfast.checkpoint.state.tensors import may_be_sharded, torch_dtype
from holdfast.errors import InvalidInput, MissingKey
from holdfast.system.rawbytes import copy_to
from holdfast.system.units import some

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_sink(tensor: torch.Tensor, base: int = 0) -> Sink:
    """Return a sink that writes bytes into a contiguous tensor in row-major order, from byte `base` on.

    The tensor is of any dtype and device, and filled in place, also if it requires grad.
    """
    if not tensor.is_contiguous():
        raise InvalidInput(f"A tensor of shape {list(tensor.shape)} must be contiguous to be filled.")
    limit, address = tensor.nbytes, tensor.data_ptr() if tensor.is_cpu else 0

    def write(offset: int, view: memoryview) -> None:
        num_bytes, at = len(view), base + offset
        assert 0 <= at <= limit - num_bytes, (at, num_bytes, limit)
        if address:
            # Not Tensor.copy_: it costs five times as much for few bytes, and for many its thread
            # pool competes with the reader's threads.
            copy_to(address + at, view)
            return
        flat = tensor.detach().view(-1).view(torch.uint8)  # also keeps the memory behind the address alive
        writable = bytearray(view) if view.readonly else view  # torch takes no other
        flat[at : at + num_bytes].copy_(torch.frombuffer(writable, dtype=torch.uint8))

    return write


def collecting_sink(
    sizes: tuple[int, ...], dtype: torch.dtype, pass_on: Callable[[torch.Tensor], None]
) -> Sink:
    """Return a sink that collects a tensor on the CPU, and passes it on once when it is complete."""
    left, lock = math.prod(sizes) * dtype.itemsize, threading.Lock()
    whole: torch.Tensor | None = None

    def write(offset: int, view: memoryview) -> None:
        nonlocal left, whole
        with lock:
            if whole is None:  # not earlier: regions come in turn, so few are in memory at once
                whole = torch.empty(sizes, dtype=dtype, device="cpu")
            room = whole
        tensor_sink(room)(offset, view)
        with lock:
            left -= len(view)
            if left:
                return
        whole = None
        pass_on(room)

    return write


def region_sink(tensor: torch.Tensor, place: Region, wanted: Region, rows: Region) -> Sink:
    """Return a sink that copies the region `wanted` of collected `rows` into a tensor, which is `place`."""

    def copy(whole: torch.Tensor) -> None:
        same_size = _SAME_SIZE[whole.element_size()]  # as integers, so that no copy rule touches a bit
        target = _narrowed(tensor.detach().view(same_size), place, wanted)
        target.copy_(_narrowed(whole.view(same_size), rows, wanted))

    return collecting_sink(rows.sizes, tensor.dtype, copy)


def _narrowed(tensor: torch.Tensor, outer: Region, inner: Region) -> torch.Tensor:
    """Return the region `inner` of a tensor that is the region `outer`."""
    for dim, (at, start, length) in enumerate(zip(inner.offsets, outer.offsets, inner.sizes, strict=True)):
        tensor = tensor.narrow(dim, at - start, length)
    return tensor


def plan_fill(parts: Parts, targets: Mapping[str, Sequence[FillTarget]], rank: int) -> list[FileRead]:
    """Return the reads that fill tensors. Changes nothing.

    Args:
        targets: contiguous tensors of the saved dtype, by name or alias of the saved one.
        rank: rank whose per-rank tensors are read, modulo the saved world size.
    """
    manifest = parts.manifest
    missing = [name for name in targets if name not in manifest.tensors and name not in manifest.tied]
    if missing:
        message = f"Step {manifest.step} holds no tensor {some(missing, 10)}."
        raise MissingKey(message, step=manifest.step, key=missing[0])
    wanted: dict[tuple[int, bool], list[Want]] = {}
    for name, target in ((name, one) for name, found in targets.items() for one in found):
        place = _place(parts, name, target, rank)
        if not place.num_items:
            continue
        for found in parts.shards_of(manifest.tied.get(name, name), rank, place):
            wanted.setdefault((found.rank, found.shard.frozen), []).append(_want(target.tensor, place, found))
    return [FileRead(parts.part(owner), wants, frozen) for (owner, frozen), wants in sorted(wanted.items())]


def fill(
    parts: Parts, targets: Mapping[str, Sequence[FillTarget]], rank: int, *, num_threads: int = 4
) -> ReadStats:
    """Fill tensors from a checkpoint by name, verified; see `plan_fill`. Reads nothing else.

    Blocks: until all targets are filled.
    """
    return read(parts.store, plan_fill(parts, targets, rank), num_threads=num_threads)


def _place(parts: Parts, name: str, target: FillTarget, rank: int) -> Region:
    """Return the region of the saved tensor that a target is."""
    saved = parts.shape_of(parts.manifest.tied.get(name, name), rank)
    if saved is None:
        saved_rank, step = rank % parts.manifest.world_size, parts.manifest.step
        raise MissingKey(
            f"Rank {saved_rank} saved no {name} of its own at step {step}.",
            step=step,
            rank=saved_rank,
            key=name,
        )
    dtype, shape = saved
    place = Region.whole(shape) if target.region is None else target.region
    tensor = target.tensor
    if tensor.dtype is torch_dtype(dtype) and tensor.shape == place.sizes and place.is_inside(shape):
        return place
    raise InvalidInput(
        f"{name} of step {parts.manifest.step} is {dtype}{list(shape)}; the tensor to be filled is "
        f"{tensor.dtype}{list(tensor.shape)}, as {list(place.sizes)} at {list(place.offsets)} of it. "
        "Nothing was changed.",
        step=parts.manifest.step,
        key=name,
    )


def _want(tensor: torch.Tensor, place: Region, found: Located) -> Want:
    """Return the read from a saved region for a tensor that is the region `place`."""
    if found.shard.region == place:
        return Want(found.start, found.shard.num_bytes, tensor_sink(tensor))
    common = place.overlap(found.shard.region)
    assert common is not None
    rows = contiguous_cover(common, found.shard.region)
    item_bytes = tensor.element_size()
    start = found.start + item_offset(rows, found.shard.region) * item_bytes
    num_bytes = rows.num_items * item_bytes
    if rows == common and is_contiguous(common, place):
        return Want(start, num_bytes, tensor_sink(tensor, item_offset(common, place) * item_bytes))
    return Want(start, num_bytes, region_sink(tensor, place, common, rows))


Rename = Mapping[str, str] | Callable[[str], str] | None


class Loaded(Struct, frozen=True):
    """Differences between a loaded checkpoint and the live objects; all empty if they fit exactly."""

    missing: tuple[str, ...]  # names that only the live objects have; they stay as they are
    unexpected: tuple[str, ...]  # names that only the checkpoint has
    notes: tuple[str, ...]  # casts, for example


def load_into(
    parts: Parts,
    target: torch.nn.Module | MutableMapping[str, Any],
    key: str | None,
    *,
    strict: bool,
    rename: Rename,
    num_threads: int,
) -> Loaded:
    """Fill live objects from a checkpoint; see `Checkpoint.load_into`."""
    rank = torch.distributed.get_rank() if may_be_sharded() else 0
    source = rank % parts.manifest.world_size
    if isinstance(target, torch.nn.Module):
        loading = _plan_objects({key or "model": target}, parts, source, strict=strict, rename=rename)
    elif not isinstance(target, MutableMapping):
        raise InvalidInput(
            f"load_into() fills a module, or a mapping of objects or tensors by name, but got a "
            f"{type(target).__name__}. Nothing was changed."
        )
    elif target and all(isinstance(value, torch.Tensor) for value in target.values()):
        loading = _plan_tensors(target, key, parts, rank, strict=strict, rename=rename)
    elif key is not None:
        raise InvalidInput(
            f"key={key!r} goes with a module or a mapping of tensors; a mapping of objects has the keys "
            "of the checkpoint. Nothing was changed."
        )
    else:
        loading = _plan_objects(target, parts, source, strict=strict, rename=rename)
    fill(parts, loading.targets, source, num_threads=num_threads)
    loading.finish()
    return Loaded(tuple(loading.missing), tuple(loading.unexpected), tuple(loading.notes))


def _plan_objects(
    objects: MutableMapping[str, Any], parts: Parts, source: int, *, strict: bool, rename: Rename
) -> Load:
    own, *others = (parts.part(saved).values for saved in parts.structures(source))
    return State(objects).load(
        parts.tensors_for(source),
        parts.manifest.tied,
        own,
        others=others,
        strict=strict,
        only=list(objects),  # not the generators: a reader keeps its own
        rename=rename,
        own_rank=False,
    )


def _plan_tensors(
    tensors: Mapping[str, torch.Tensor],
    key: str | None,
    parts: Parts,
    rank: int,
    *,
    strict: bool,
    rename: Rename,
) -> Load:
    """Plan the fill of a state dict. Its names are those of the checkpoint without the prefix `key`."""
    prefix = "" if key is None else f"{key}."
    plan = Load(parts.tensors_for(rank), parts.manifest.tied, {}, renamer(rename), rank=rank)
    for name, tensor in tensors.items():
        label = prefix + name
        if label in plan.saved_names:
            plan.fill(plan.saved_names[label], tensor, label)
        else:
            plan.missing.append(label)
    extra = [
        saved
        for live, saved in plan.saved_names.items()
        if key is not None and live.startswith(prefix) and saved not in plan.used
    ]
    return plan.complete(extra, strict=strict)
