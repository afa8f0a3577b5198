"""Weights of a sharded model: sent from rank 0 one tensor at a time, each rank keeps its shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import xxhash
from msgspec import Struct
from torch import nn

from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.state.sharding import shards_of
from holdfast.checkpoint.state.tensors import is_dtensor
from holdfast.errors import InvalidInput, NotFound
from holdfast.system.rawbytes import view_bytes
from holdfast.system.units import plural

WeightsLike: TypeAlias = "Mapping[str, torch.Tensor] | Checkpoint | str | os.PathLike[str]"
"""Source of weights: a state dict, a checkpoint, or the home of a run with its newest checkpoint."""

Read = Callable[[str], torch.Tensor]


class ModelDigest(Struct, frozen=True):
    """Digest of a rank's model before sharding."""

    structure: str  # digest of names, shapes and dtypes of all tensors
    content: str | None  # digest of all values. None if some tensors are on meta
    on_meta: tuple[str, ...]  # names of the tensors on meta


class WeightSource(Struct, frozen=True):
    """Source of rank 0's tensors. On other ranks it is never read."""

    read: Read  # function from a name to the full tensor, on any device
    names: frozenset[str]  # names of the available tensors. On rank 0 only
    description: str  # text for the user


def digest_model(model: nn.Module) -> ModelDigest:
    """Return the digest of a model that is not sharded yet. Reads every byte once."""
    structure, content = xxhash.xxh3_128(), xxhash.xxh3_128()
    on_meta = []
    for name, tensor in _tensors(model):
        structure.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.is_meta:
            on_meta.append(name)
        elif not on_meta and tensor.nbytes:
            content.update(view_bytes(tensor.detach().cpu().contiguous()))
    return ModelDigest(structure.hexdigest(), None if on_meta else content.hexdigest(), tuple(on_meta))


def choose_source(
    model: nn.Module, digests: Sequence[ModelDigest], weights: WeightsLike | None, ranks: Ranks
) -> WeightSource | None:
    """Return the source of all ranks' weights, or None if they are already equal.

    Call it before the model is sharded: the source refers to rank 0's full tensors.

    Ranks: collective.
    """
    first = digests[0]
    for other, digest in enumerate(digests):
        if digest.structure != first.structure:
            raise InvalidInput(
                f"The model of rank {other} differs from rank 0's in names, shapes or dtypes of its "
                "parameters. Build the same model on every rank. Nothing was changed.",
                rank=other,
            )
    if ranks.share(weights is not None):
        on_meta = {name for digest in digests for name in digest.on_meta}
        sources: list[WeightSource] = []  # of rank 0
        _on_rank_0(lambda: sources.append(_fitting(model, weights, on_meta)), ranks)
        return sources[0] if sources else WeightSource({}.__getitem__, frozenset(), "")
    if first.on_meta:
        raise InvalidInput(
            f"The model is on meta ({plural(len(first.on_meta), 'tensor')}, such as {first.on_meta[0]}) and "
            "weights= is missing. Pass a state dict, a checkpoint or the home of a run as weights=, or build "
            "the model with its weights on rank 0 and on meta on the other ranks. Nothing was changed."
        )
    if all(one.content == first.content for one in digests):
        return None
    tensors = {name: tensor.detach() for name, tensor in _tensors(model)} if ranks.rank == 0 else {}
    are_on_meta = any(one.on_meta for one in digests)
    description = "rank 0's weights" if are_on_meta else "rank 0's weights, because the ranks' differed"
    return WeightSource(tensors.__getitem__, frozenset(tensors), description)


def materialize(model: nn.Module, device: str, *, cpu_offload: bool) -> None:
    """Allocate the tensors on meta of a sharded model, without values; `cpu_offload`: in host memory."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a buffer may occur in several modules

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        where = _device(device if not (cpu_offload and is_dtensor(tensor)) else "cpu")
        return made.setdefault(id(tensor), (torch.empty_like(tensor, device=where), tensor))[0]

    with torch.no_grad():
        model._apply(filled)  # keeps the identity of parameters, and so their ties


def broadcast_weights(model: nn.Module, source: WeightSource, device: str, ranks: Ranks) -> int:
    """Fill a sharded model with rank 0's weights, and return the number of bytes sent.

    At any time a rank holds one full tensor besides its own shards.

    Ranks: collective.
    Blocks: until everything is sent.
    """
    where = _device(device)
    sent_bytes = 0
    wanted = set(ranks.share([name for name, _ in _tensors(model) if _plain_name(name) in source.names]))
    with torch.no_grad():
        for name, live in _tensors(model):
            if name not in wanted:
                continue
            whole = torch.empty(live.shape, dtype=live.dtype, device=where)
            _on_rank_0(partial(_read, whole, source, _plain_name(name)), ranks)
            dist.broadcast(whole, src=0)
            for shard, region in shards_of(live, ranks.rank):
                shard.copy_(whole[region.slices])
            sent_bytes += whole.nbytes
    return sent_bytes


def _fitting(model: nn.Module, weights: Any, on_meta: Set[str]) -> WeightSource:
    """Return the source that the caller passed, if it has all parameters and all buffers on meta."""
    if isinstance(weights, Mapping):
        source = WeightSource(weights.__getitem__, frozenset(weights), "the given state dict")
        shape_of: Callable[[str], tuple[int, ...]] = lambda name: tuple(weights[name].shape)  # noqa: E731
    else:
        checkpoint = weights if isinstance(weights, Checkpoint) else open_checkpoint(weights)
        prefix = _prefix_in(checkpoint, [name for name, _ in model.named_parameters()])
        names = frozenset(key.removeprefix(prefix) for key in checkpoint if key.startswith(prefix))
        described = f"step {checkpoint.step} of a run's checkpoints"
        source = WeightSource(lambda name: checkpoint[f"{prefix}{name}"], names, described)
        shape_of = lambda name: checkpoint.info(f"{prefix}{name}").shape  # noqa: E731
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen: dict[str, str] = {}  # files often have only one name of a tied parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in source.names:
            chosen.setdefault(first[id(parameter)], name)
    if missing := [name for name in first.values() if name not in chosen]:
        raise InvalidInput(
            f"weights= lacks {len(missing)} of {plural(len(first), 'parameter')}, such as {missing[0]}. Its "
            "names must be those of the model's state dict. Nothing was changed."
        )
    for name, parameter in model.named_parameters():
        _check_shape(name, shape_of(chosen[name]), tuple(parameter.shape))
    if lost := sorted(on_meta - source.names - set(first.values())):
        raise InvalidInput(
            f"{plural(len(lost), 'buffer')} on meta would stay without values: "
            f"weights= lacks {lost[0]}. Put only the parameters on meta, or build the whole model on rank 0 "
            "and omit weights=, which also sends its buffers. Nothing was changed."
        )
    names = source.names | chosen.keys()
    return WeightSource(lambda name: source.read(chosen.get(name, name)), names, source.description)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise InvalidInput(
            f"weights= has {name} of shape {found}, but the model's shape is {expected}. These are weights "
            "of another model."
        )


def _prefix_in(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    """Return the prefix of the model's names in a checkpoint, such as `model.`."""
    keys = set(checkpoint.keys())
    ends = [key.removesuffix(names[0]) for key in keys if key.endswith(f".{names[0]}")] if names else []
    fits = sorted(end for end in ends if all(f"{end}{name}" in keys for name in names))
    if "model." in fits or len(fits) == 1:
        return "model." if "model." in fits else fits[0]
    if fits:
        raise InvalidInput(
            f"Step {checkpoint.step} has weights for this model under several names: {', '.join(fits)}. Pass "
            "a mapping with the right ones."
        )
    raise NotFound(
        f"Step {checkpoint.step} has no weights for this model: it lacks tensors named "
        f"*.{names[0] if names else ''} and so on. It is a checkpoint of another model."
    )


def _read(whole: torch.Tensor, source: WeightSource, name: str) -> None:
    found = source.read(name)
    _check_shape(name, tuple(found.shape), tuple(whole.shape))
    whole.copy_(found)


def _on_rank_0(act: Callable[[], None], ranks: Ranks) -> None:
    """Call `act` on rank 0. If it fails, all ranks raise, and none waits."""
    outcome = ranks.on_first(act)
    if outcome.error is not None:
        raise outcome.error


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers, each once, in the same order on all ranks."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _device(kind: str) -> torch.device:
    """Return this rank's device of a type."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())
