"""Checkpoints that another number of ranks has saved: partitions of ZeRO, divided again or merged."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed.runtime.engine as stock
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.utils import ZeRORuntimeException

from holdfast.adapters.deepspeed.saved_files import Facts, SavedFiles
from holdfast.errors import Unsupported

_FLAT_12, _FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_BASE_12, _BASE_3 = "base_optimizer_state", "optimizer_state_dict"
_PARTITIONED = 3
"""Stage of ZeRO that partitions each parameter by itself."""


class UnsupportedRanks(Unsupported, ZeRORuntimeException):
    """Refusal of a checkpoint that another number of ranks saved. Scripts for DeepSpeed catch it too."""


Groups = list[list[tuple[str, int]]]
"""Name and size of each parameter, by flat group, as an engine flattens them."""


def groups_of(shapes: Iterable[Mapping[str, Iterable[int]]]) -> Groups:
    """Return the groups of parameters with some shapes."""
    return [[(name, math.prod(shape)) for name, shape in group.items()] for group in shapes]


def reshard(
    states: Sequence[Mapping[str, Any]],
    groups: Groups,
    partition_sizes: Sequence[int],
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """Return the state of a partitioned optimizer, divided among another number of ranks.

    `partition_sizes` are the elements of a rank's partition of each flat group, with padding.
    """
    first = dict(states[0])
    stage = int(first["zero_stage"])
    flat_key, base_key = (_FLAT_3, _BASE_3) if stage == _PARTITIONED else (_FLAT_12, _BASE_12)
    if not isinstance(first[base_key], Mapping):
        raise UnsupportedRanks(
            'The optimizer was saved with "elastic_checkpoint": true, and cannot be split for another number '
            "of ranks. The weights were loaded, the optimizer was not. Resume on as many ranks as saved it, "
            'and remove "elastic_checkpoint" there for later changes.'
        )

    def split(group: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = [size for _, size in groups[group]]
        if stage == _PARTITIONED:
            return split_each(parts, sizes, rank=rank, world_size=world_size)
        size = partition_sizes[group]
        whole = torch.cat([part.detach().flatten() for part in parts])[: sum(sizes)]
        return _padded(whole[rank * size : (rank + 1) * size], size)

    first[flat_key] = [
        split(group, [state[flat_key][group] for state in states]) for group in range(len(groups))
    ]
    first[base_key] = _reshard_base([state[base_key] for state in states], states, flat_key, split)
    saved = first.get("partition_count")
    first["partition_count"] = [world_size] * len(saved) if isinstance(saved, list) else world_size
    return first


def _reshard_base(
    bases: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    flat_key: str,
    split: Callable[[int, Sequence[torch.Tensor]], torch.Tensor],
) -> dict[str, Any]:
    """Return the state of the inner optimizer, whose tensors are flat like the parameters."""
    made: dict[Any, dict[str, Any]] = {}
    for group, values in bases[0]["state"].items():
        made[group] = {}
        for key, value in values.items():
            parts = [base["state"][group][key] for base in bases]
            is_flat = isinstance(value, torch.Tensor) and value.dim() > 0
            # Of the padding, which the flat parameters do not have, nothing is needed.
            lengths = [state[flat_key][group].numel() for state in states]
            if is_flat and any(part.numel() < n for part, n in zip(parts, lengths, strict=True)):
                raise UnsupportedRanks(
                    f"The optimizer's {key} does not have an element per parameter, so it cannot be split "
                    "for another number of ranks. The weights were loaded, the optimizer was not. Resume on "
                    "as many ranks as saved it."
                )
            cut = [part[:n] for part, n in zip(parts, lengths, strict=True)] if is_flat else parts
            made[group][key] = split(group, cut) if is_flat else value
    return {**bases[0], "state": made}


def split_each(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], *, rank: int, world_size: int
) -> torch.Tensor:
    """Return a rank's partition of each parameter of a group, as ZeRO 3 has them."""
    found, start = [], 0
    for size in sizes:
        saved, live = math.ceil(size / len(parts)), math.ceil(size / world_size)
        whole = torch.cat([part.detach()[start : start + saved] for part in parts])[:size]
        found.append(_padded(whole[rank * live : (rank + 1) * live], live))
        start += saved
    return torch.cat(found)


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    padding = torch.zeros(size - tensor.numel(), dtype=tensor.dtype)
    return torch.cat([tensor, padding])


_RANK = re.compile(r"((?:bf16_)?zero_pp_rank_)(\d+)(_mp_rank_00_(optim|model)_states\.pt)")
_MODEL = "mp_rank_00_model_states.pt"


class ReshardedFiles:
    """Files of one checkpoint as this number of ranks would have saved them."""

    def __init__(self, files: SavedFiles, engine: Any) -> None:
        self.facts: Facts = files.facts
        self.checkpoint = files.checkpoint
        self.files, self._engine = files, engine
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.owners = self._make_owners()

    def _make_owners(self) -> dict[str, int]:
        owners: dict[str, int] = {}
        for name in self.files.owners:
            match = _RANK.fullmatch(name)
            if match is not None:
                owners |= {f"{match[1]}{rank}{match[3]}": rank for rank in range(self._world_size)}
            elif name == _MODEL:
                owners[name] = 0
            else:
                raise self._refused(f"{name} belongs to tensor, expert or pipeline parallelism")
        return owners

    def _refused(self, why: str, done: str = "Nothing was loaded") -> UnsupportedRanks:
        saved = self.checkpoint.world_size
        return UnsupportedRanks(
            f"{self.facts.tag} was saved by {saved} ranks and cannot be loaded by {self._world_size}: {why}. "
            f"{done}. Resume on {saved} ranks; or export it (`holdfast export --to deepspeed`), "
            "convert it with ds_to_universal, and load that with load_universal."
        )

    def load(self, name: str) -> Any:
        """Load the content of a file, resharded if it has partitions."""
        match = _RANK.fullmatch(name)
        if match is not None and match[4] == "optim":
            return self._load_optimizer(match[1], match[3], int(match[2]))
        saved = name if match is None else f"{match[1]}0{match[3]}"
        content: dict[str, Any] = self.files.load(saved)
        if match is not None and content.get("frozen_param_shapes"):
            raise self._refused("ZeRO 3 partitions its frozen parameters")
        shapes = content.get("param_shapes")
        if shapes is not None and groups_of(shapes) != self._groups():
            raise self._refused(
                "its parameters had another order or other groups, as with round_robin_gradients or another "
                "sub_group_size, and need the same settings"
            )
        return {**content, "dp_world_size": self._engine.seq_dp_world_size}

    def _load_optimizer(self, before: str, after: str, rank: int) -> Any:
        saved = range(self.checkpoint.world_size)
        contents = [self.files.load(f"{before}{one}{after}") for one in saved]
        states = [one["optimizer_state_dict"] for one in contents]
        if any(map(any, states[0].get("param_alignment_paddings", ()))):
            raise self._refused("its parameters are aligned", "The optimizer was not loaded")
        flat = getattr(self._engine.optimizer, "single_partition_of_fp32_groups", None)
        flat = self._engine.optimizer.fp32_partitioned_groups_flat if flat is None else flat
        sizes = [one.numel() for one in flat]
        resharded = reshard(states, self._groups(), sizes, rank, self._world_size)
        return {**contents[0], "optimizer_state_dict": resharded}

    def _groups(self) -> Groups:
        return groups_of(self._engine._get_zero_param_shapes())


_NAME = "get_fp32_state_dict_from_zero_checkpoint"
"""Function by which DeepSpeed's engine reads the weights from its files."""


@contextlib.contextmanager
def returning_weights(files: SavedFiles) -> Iterator[None]:
    """Have DeepSpeed's engine take whole weights from a checkpoint instead of its own files."""
    original = getattr(stock, _NAME)
    setattr(stock, _NAME, lambda folder: merge_weights(files))
    try:
        yield
    finally:
        setattr(stock, _NAME, original)


def merge_weights(files: SavedFiles) -> dict[str, torch.Tensor]:
    """Return the whole weights in full precision, and the buffers."""
    models = [files.load(name) for name in _names(files, "_model_states.pt")]
    optimizers = [files.load(name)["optimizer_state_dict"] for name in _names(files, "_optim_states.pt")]
    flats = [torch.cat([one.detach().flatten() for one in each[_FLAT_3]]) for each in optimizers]
    first = models[0]
    buffers = set(first["buffer_names"])
    made = {name: value for name, value in first["module"].items() if name in buffers}
    shapes = {name: shape for group in first["param_shapes"] for name, shape in group.items()}
    made |= _merge(flats, shapes)
    frozen: Mapping[str, Sequence[int]] = first.get("frozen_param_shapes") or {}
    for name, shape in frozen.items():
        made |= _merge([model["frozen_param_fragments"][name].flatten() for model in models], {name: shape})
    return made | {name: made[other] for name, other in first["shared_params"].items() if other in made}


def _names(files: SavedFiles, end: str) -> list[str]:
    """Return the names of the files with this suffix, ordered by rank."""
    return sorted((name for name in files.owners if name.endswith(end)), key=lambda name: files.owners[name])


def _merge(parts: Sequence[torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    whole = split_each(parts, sizes, rank=0, world_size=1).split(sizes)
    return {name: one.view(tuple(shape)) for (name, shape), one in zip(shapes.items(), whole, strict=True)}
