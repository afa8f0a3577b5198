"""Load of one checkpoint into live objects by a reader: verified, resharded, without a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.restore.fill import fill
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.state import Load, State
from holdfast.checkpoint.state.load import LoadPlan, mismatch, renamer
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import InvalidInput

Rename = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Differences between a loaded checkpoint and the live objects; all empty if they fit exactly."""

    missing: tuple[str, ...]  # names that only the live objects have; they stay as they are
    unexpected: tuple[str, ...]  # names that only the checkpoint has
    notes: tuple[str, ...]  # casts, for example


def load_into(
    store: Store,
    parts: Parts,
    target: torch.nn.Module | MutableMapping[str, Any],
    key: str | None,
    *,
    strict: bool,
    rename: Rename,
    num_threads: int,
) -> Loaded:
    """Fill live objects from a checkpoint; see `Checkpoint.load_into`."""
    rank = torch.distributed.get_rank() if _is_distributed() else 0
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
    fill(store, parts.manifest, loading.targets, source, num_threads=num_threads, parts=parts)
    loading.finish()
    return Loaded(tuple(loading.missing), tuple(loading.unexpected), tuple(loading.notes))


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


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
    plan = LoadPlan(parts.tensors_for(rank), parts.manifest.tied, {}, renamer(rename), rank=rank)
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
    if strict and (plan.missing or extra):
        raise mismatch(plan.missing, extra)
    return Load(plan, extra)
