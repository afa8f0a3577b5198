"""Brings weights to a sharded model: one tensor at a time, from rank 0 to all, which keep their part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from holdfast.errors import HoldfastError, InvalidInput, NotFound
from holdfast.quantity import plural
from holdfast.rawbytes import view_bytes
from holdfast.restore.checkpoint import Checkpoint
from holdfast.restore.checkpoint import open as open_checkpoint
from holdfast.state.sharding import is_dtensor, local_of, sharding_of
from holdfast.train.sharding.units import plain_name

WeightsLike: TypeAlias = "Mapping[str, torch.Tensor] | Checkpoint | str | os.PathLike[str]"
"""Where weights come from: a state dict, a checkpoint, or the home of a run, whose newest one is taken."""

_T = TypeVar("_T")
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Findings:
    """What a rank's model was before it was sharded.

    Args:
        structure: digest of names, shapes and dtypes of all tensors.
        content: digest of all values; None if some are on meta.
        on_meta: names of the tensors on meta.
    """

    structure: str
    content: str | None
    on_meta: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where rank 0 takes each tensor from. Other ranks have one that is never read.

    Args:
        read: a tensor by name, whole, on any device.
        names: of the tensors that there are; on rank 0 only.
        said: what it is, in words.
    """

    read: Read
    names: frozenset[str]
    said: str


def look(model: nn.Module) -> Findings:
    """Digests of a model that is not sharded yet. Reads every byte of it once.

    Ranks: not collective.
    """
    structure, content = xxhash.xxh3_128(), xxhash.xxh3_128()
    on_meta = []
    for name, tensor in _tensors(model):
        structure.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.is_meta:
            on_meta.append(name)
        elif not on_meta:
            _feed(content, tensor)
    return Findings(structure.hexdigest(), None if on_meta else content.hexdigest(), tuple(on_meta))


def choose_source(
    model: nn.Module, findings: Sequence[Findings], weights: WeightsLike | None, rank: int
) -> Source | None:
    """Where the weights of all ranks are to come from; None if they are alike on all of them already.

    Must be called before the model is sharded: it takes hold of rank 0's whole tensors.

    Args:
        model: this rank's, not sharded yet.
        findings: of all ranks.
        weights: what the caller gave; only rank 0's is looked at.
        rank: this one's number.

    Raises:
        InvalidInput: models that differ, a model on meta and no weights for it, or weights that do not fit.
        NotFound: there is no such checkpoint.

    Ranks: collective.
    """
    first = findings[0]
    for other, found in enumerate(findings):
        if found.structure != first.structure:
            raise InvalidInput(
                f"The model of rank {other} is not that of rank 0: names, shapes or dtypes of its parameters "
                "differ. Build the same model on every rank; nothing was changed.",
                rank=other,
            )
    if _of_first(weights is not None):
        return _given(model, weights, [name for f in findings for name in f.on_meta], rank)
    if first.on_meta:
        raise InvalidInput(
            f"The model is on meta ({plural(len(first.on_meta), 'tensor')}, {first.on_meta[0]} "
            "among them) and no "
            "weights were named for it; nothing was changed. Pass weights= a state dict, a checkpoint or the "
            "home of a run, or build the model with its weights on rank 0 and on meta elsewhere."
        )
    if all(found.content == first.content for found in findings):
        return None
    held = {name: tensor.detach() for name, tensor in _tensors(model)} if rank == 0 else {}
    are_on_meta = any(found.on_meta for found in findings)
    said = "rank 0's weights" if are_on_meta else "rank 0's weights, since the ranks' differed"
    return Source(held.__getitem__, frozenset(held), said)


def materialize(model: nn.Module, device: str, *, offload: bool) -> None:
    """Give memory to what is on meta in a sharded model, without values.

    Args:
        model: sharded.
        device: type of the device to compute on.
        offload: parameters live in host memory instead.

    Ranks: not collective.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a buffer may stand in several modules

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        where = _device(device if not (offload and is_dtensor(tensor)) else "cpu")
        return made.setdefault(id(tensor), (torch.empty_like(tensor, device=where), tensor))[0]

    with torch.no_grad():
        model._apply(filled)  # parameters keep their identity, and so their ties


def stream(model: nn.Module, source: Source, device: str, rank: int) -> int:
    """Fill a sharded model from rank 0; returns the bytes that were sent.

    At any time a rank holds one whole tensor beside its own parts.

    Args:
        model: sharded, with memory.
        source: what `choose_source` answered.
        device: type of the device that the process group carries.
        rank: this one's number.

    Raises:
        HoldfastError: rank 0 could not read a tensor; every rank raises.

    Ranks: collective.
    Blocks: until everything has been sent.
    """
    where = _device(device)
    sent = 0
    wanted = _of_first({name for name, _ in _tensors(model) if plain_name(name) in source.names})
    with torch.no_grad():
        for name, live in _tensors(model):
            if name not in wanted:
                continue
            whole = torch.empty(live.shape, dtype=live.dtype, device=where)
            _read_on_first(whole, source, plain_name(name), rank, where)
            dist.broadcast(whole, src=0)
            _cut_into(live, whole)
            sent += whole.nbytes
    return sent


def _given(model: nn.Module, weights: WeightsLike | None, on_meta: Iterable[str], rank: int) -> Source:
    """The source that the caller named, once rank 0 has seen that it fits; all ranks raise if it does not."""
    error: HoldfastError | None = None
    source = Source(_nothing, frozenset(), "")
    if rank == 0:
        try:
            source = _fitting(model, weights)
            _check_buffers(model, source, on_meta)
        except HoldfastError as problem:
            error = problem
    error = _of_first(error)
    if error is not None:
        raise error
    return source


def _fitting(model: nn.Module, weights: Any) -> Source:
    source, shape_of = (
        _from_mapping(weights) if isinstance(weights, Mapping) else _from_checkpoint(model, weights)
    )
    aliases = _aliases(model)  # files often have only one name of a tied parameter
    chosen = {
        name: next((one for one in names if one in source.names), None) for name, names in aliases.items()
    }
    missing = [name for name, found in chosen.items() if found is None]
    if missing:
        raise InvalidInput(
            f"weights= has nothing for {len(missing)} of {plural(len(chosen), 'parameter')}, "
            f"{missing[0]} among them; "
            "nothing was changed. They must have the names of the model's own state dict."
        )
    for name, parameter in model.named_parameters():
        found = chosen[name]
        assert found is not None
        _check_shape(name, shape_of(found), tuple(parameter.shape))
    names = source.names | chosen.keys()
    return Source(lambda name: source.read(chosen.get(name) or name), names, source.said)


def _from_mapping(weights: Mapping[str, torch.Tensor]) -> tuple[Source, Callable[[str], tuple[int, ...]]]:
    source = Source(weights.__getitem__, frozenset(weights), "the given state dict")
    return source, lambda name: tuple(weights[name].shape)


def _from_checkpoint(model: nn.Module, weights: Any) -> tuple[Source, Callable[[str], tuple[int, ...]]]:
    checkpoint = weights if isinstance(weights, Checkpoint) else open_checkpoint(weights)
    prefix = _prefix_in(checkpoint, [name for name, _ in model.named_parameters()])
    names = frozenset(key.removeprefix(prefix) for key in checkpoint if key.startswith(prefix))
    said = f"step {checkpoint.step} of a run's checkpoints"
    source = Source(lambda name: checkpoint[f"{prefix}{name}"], names, said)
    return source, lambda name: checkpoint.info(f"{prefix}{name}").shape


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Every name of each parameter, by its first."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(first[id(parameter)], []).append(name)
    return found


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise InvalidInput(
            f"weights= has {name} of shape {found}, but the model's is {expected}. These are weights of "
            "another model."
        )


def _check_buffers(model: nn.Module, source: Source, on_meta: Iterable[str]) -> None:
    lost = sorted(
        {name for name in on_meta if name not in source.names} - {n for n, _ in model.named_parameters()}
    )
    if lost:
        raise InvalidInput(
            f"{len(lost)} buffers are on meta and not in weights=, {lost[0]} among them; their values would "
            "be lost, so nothing was changed. Put only the parameters on meta, or build the whole model on "
            "rank 0 and leave weights= out: its buffers are then sent too."
        )


def _prefix_in(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    """What stands before the model's names in a checkpoint, such as `model.`."""
    keys = set(checkpoint.keys())
    ends = [key.removesuffix(names[0]) for key in keys if key.endswith(f".{names[0]}")] if names else []
    fits = sorted(end for end in ends if all(f"{end}{name}" in keys for name in names))
    if "model." in fits or len(fits) == 1:
        return "model." if "model." in fits else fits[0]
    if fits:
        raise InvalidInput(
            f"Step {checkpoint.step} has weights for this model under several names: {', '.join(fits)}. Pass "
            "a mapping with those that are meant."
        )
    raise NotFound(
        f"Step {checkpoint.step} has no weights for this model: no tensor there is named "
        f"....{names[0] if names else ''} together with all others. It holds another model."
    )


def _read_on_first(whole: torch.Tensor, source: Source, name: str, rank: int, where: torch.device) -> None:
    """Rank 0 reads; if it cannot, every rank hears of it before the tensor is sent."""
    problem: HoldfastError | None = None
    if rank == 0:
        try:
            read = source.read(name)
            _check_shape(name, tuple(read.shape), tuple(whole.shape))
            whole.copy_(read)
        except HoldfastError as error:
            problem = error
    failed = torch.tensor([problem is not None], dtype=torch.uint8, device=where)
    dist.broadcast(failed, src=0)
    if failed.item():
        raised = _of_first(problem)
        assert raised is not None
        raise raised


def _cut_into(live: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the part of a whole tensor that this rank holds."""
    sharding = sharding_of(live)
    if sharding is None:
        live.copy_(whole)
        return
    box = sharding.box_of(dist.get_rank())
    if box is not None:
        region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
        local_of(live).copy_(whole[region])


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """All parameters and buffers, each once, in an order that is the same on all ranks."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _device(kind: str) -> torch.device:
    """This rank's device of a type."""
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def _feed(digest: Any, tensor: torch.Tensor) -> None:
    flat = tensor.detach().cpu().contiguous()
    if flat.nbytes:
        digest.update(view_bytes(flat))


def _of_first(value: _T) -> _T:
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _nothing(name: str) -> torch.Tensor:
    raise KeyError(name)
