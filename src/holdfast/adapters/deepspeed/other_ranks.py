"""Files of a checkpoint, loaded by another number of ranks than saved them."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from holdfast.adapters.deepspeed.resharding import Layout, UnsupportedRanks, check_layouts, reshard
from holdfast.adapters.deepspeed.saved_files import Facts, SavedFiles

_RANK = re.compile(r"((?:bf16_)?zero_pp_rank_)(\d+)(_mp_rank_00_(optim|model)_states\.pt)")
_MODEL = "mp_rank_00_model_states.pt"


class ReshardedFiles:
    """Files of one checkpoint as this number of ranks would have saved them.

    Args:
        files: the files as they were saved.
        engine: engine that loads.

    Raises:
        UnsupportedRanks: files of tensor or expert parallelism, or frozen parameters under ZeRO 3.
    """

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
        """Load the content of a file, resharded if it has partitions.

        Raises:
            UnsupportedRanks: the partitions cannot be resharded.
            HoldfastError: as `SavedFiles.load`.
        """
        match = _RANK.fullmatch(name)
        if match is not None and match[4] == "optim":
            return self._load_optimizer(match[1], match[3], int(match[2]))
        saved = name if match is None else f"{match[1]}0{match[3]}"
        content: dict[str, Any] = self.files.load(saved)
        if match is not None and content.get("frozen_param_shapes"):
            raise self._refused("ZeRO 3 partitions its frozen parameters")
        if content.get("param_shapes") is not None:
            check_layouts(_layout(content["param_shapes"], ()), self._live(()), self.facts.tag)
        return {**content, "dp_world_size": self._engine.seq_dp_world_size}

    def _load_optimizer(self, before: str, after: str, rank: int) -> Any:
        saved = range(self.checkpoint.world_size)
        contents = [self.files.load(f"{before}{one}{after}") for one in saved]
        states = [one["optimizer_state_dict"] for one in contents]
        if any(map(any, states[0].get("param_alignment_paddings", ()))):
            raise self._refused("its parameters are aligned", "The optimizer was not loaded")
        live = self._live(_partition_sizes(self._engine.optimizer))
        return {**contents[0], "optimizer_state_dict": reshard(states, live, rank, self._world_size)}

    def _live(self, sizes: Iterable[int]) -> Layout:
        return _layout(self._engine._get_zero_param_shapes(), sizes)


def _layout(shapes: Iterable[Mapping[str, Iterable[int]]], sizes: Iterable[int]) -> Layout:
    groups = (tuple((name, math.prod(shape)) for name, shape in group.items()) for group in shapes)
    return Layout(tuple(groups), tuple(sizes))


def _partition_sizes(optimizer: Any) -> list[int]:
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None)
    return [one.numel() for one in (optimizer.fp32_partitioned_groups_flat if flat is None else flat)]
