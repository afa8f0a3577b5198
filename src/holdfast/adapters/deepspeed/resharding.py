"""Partitions of ZeRO, divided again among another number of ranks; pure."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.utils import ZeRORuntimeException

from holdfast.errors import Unsupported

_FLAT_12, _FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_BASE_12, _BASE_3 = "base_optimizer_state", "optimizer_state_dict"
_PARTITIONED = 3
"""Stage of ZeRO that partitions each parameter by itself."""


class UnsupportedRanks(Unsupported, ZeRORuntimeException):
    """Refusal of a checkpoint that another number of ranks saved. Scripts for DeepSpeed catch it too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parameters as an engine flattens them.

    Attributes:
        groups: size of each parameter by name, in the order of each flat group.
        partition_sizes: elements of a rank's partition of each flat group, with padding.
    """

    groups: tuple[tuple[tuple[str, int], ...], ...]
    partition_sizes: tuple[int, ...]


def check_layouts(saved: Layout, live: Layout, tag: str) -> None:
    """Check that two layouts have the same parameters in the same order.

    Raises:
        UnsupportedRanks: they differ.
    """
    if saved.groups != live.groups:
        raise UnsupportedRanks(
            f"{tag} was saved on another number of ranks, and the parameters had another order or other "
            "groups, as with round_robin_gradients or another sub_group_size. Nothing was loaded. Use the "
            "same settings, or the same number of ranks; or export it with `holdfast export --to deepspeed`, "
            "convert it with ds_to_universal, and load that with load_universal."
        )


def reshard(states: Sequence[Mapping[str, Any]], live: Layout, rank: int, world_size: int) -> dict[str, Any]:
    """Return the state of a partitioned optimizer, divided among another number of ranks.

    Args:
        states: `optimizer_state_dict` of each rank that has saved.
        live: layout of the engine that loads.
        rank: rank that loads.
        world_size: number of ranks that load.

    Raises:
        UnsupportedRanks: the state does not have an element per parameter; or it was saved with
            `elastic_checkpoint`, which has another form.
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
        sizes = [size for _, size in live.groups[group]]
        if stage == _PARTITIONED:
            return split_each(parts, sizes, rank=rank, world_size=world_size)
        return _split_flat(parts, sum(sizes), rank, live.partition_sizes[group])

    first[flat_key] = [
        split(group, [state[flat_key][group] for state in states]) for group in range(len(live.groups))
    ]
    first[base_key] = _reshard_base([state[base_key] for state in states], states, flat_key, split)
    first["partition_count"] = _counts(first.get("partition_count"), world_size)
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


def _split_flat(parts: Sequence[torch.Tensor], total: int, rank: int, size: int) -> torch.Tensor:
    """Return a rank's partition of a flat group, padded with zeros."""
    whole = torch.cat([part.detach().flatten() for part in parts])[:total]
    return _padded(whole[rank * size : (rank + 1) * size], size)


def split_each(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], *, rank: int, world_size: int
) -> torch.Tensor:
    """Return a rank's partition of each parameter of a group, as ZeRO 3 has them.

    Args:
        parts: partitions of the ranks that have saved, each with all parameters of the group.
        sizes: number of elements of each parameter.
        rank: rank that loads.
        world_size: number of ranks that load.
    """
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


def _counts(saved: Any, world_size: int) -> Any:
    return [world_size] * len(saved) if isinstance(saved, list) else world_size
