"""Saves by DCP in which a rank writes several regions of a tensor, all ranks in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from holdfast.adapters.dcp import HoldfastWriter

Rows = tuple[int, int]
"""First row of a region, and the row after its last one."""


class RegionPlanner(DefaultSavePlanner):
    """Planner of a rank that has some rows of each tensor."""

    def __init__(self, regions: Sequence[Rows]) -> None:
        super().__init__()
        self._regions = regions

    def create_local_plan(self) -> SavePlan:
        items = []
        for item in super().create_local_plan().items:
            if item.tensor_data is None:
                items.append(item)
                continue
            for first, stop in self._regions:
                rest = item.tensor_data.size[1:]
                offsets = torch.Size([first, *(0 for _ in rest)])
                chunk = ChunkStorageMetadata(offsets, torch.Size([stop - first, *rest]))
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = dataclasses.replace(item.index, offset=offsets)
                items.append(
                    dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)
                )
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if index.offset is None or not isinstance(found, torch.Tensor):
            return found
        first = index.offset[0]
        stop = next(stop for start, stop in self._regions if start == first)
        return found[first:stop]


def save_regions(home: Path, step: int, state: dict[str, Any], by_rank: Sequence[Sequence[Rows]]) -> None:
    """Save tensors of which each rank has some rows, and values that rank 0 has."""
    planners = [RegionPlanner(regions) for regions in by_rank]
    plans = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner(
            {name: value for name, value in state.items() if rank == 0 or isinstance(value, torch.Tensor)},
            is_coordinator=rank == 0,
        )
        plans.append(planner.create_local_plan())
    writer = HoldfastWriter(home, step=step)
    results = []
    for plan, planner in zip(writer.prepare_global_plan(plans), planners, strict=True):
        results.append(writer.write_data(plan, planner).wait())
    writer.finish(Metadata({}), results)
