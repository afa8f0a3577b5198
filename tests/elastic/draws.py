"""Random layouts of random tensors on four ranks: the code of a rank for a drawn case."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from elastic.trips import checkpointer
from layouts import mesh_of, same, whole

MESHES = ((4,), (2, 2), (4, 1), (1, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@dataclass(frozen=True)
class Drawn:
    """A tensor and its placements: "p" plain on all ranks, "r" replicated, 0, 1, ... cut along, "s0" strided.

    Args:
        shape: of the whole.
        dtype: index into `DTYPES`.
        placements: "p" alone, or one for each dimension of the mesh.
    """

    shape: tuple[int, ...]
    dtype: int
    placements: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """Tensors in one layout, and the same tensors in another."""

    mesh: int
    tensors: tuple[Drawn, ...]
    other_mesh: int
    others: tuple[tuple[Any, ...], ...]


def content(drawn: Drawn, seed: int) -> torch.Tensor:
    """The whole tensor, alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, drawn.shape, generator=generator).to(DTYPES[drawn.dtype])


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> torch.Tensor:
    """A tensor in a layout."""
    if placements == ("p",):
        return tensor
    if "s0" in placements:  # rows cut by the second dimension first, and then by the first
        inner = distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
        local = inner.to_local().chunk(2, 0)
        mine = mesh.get_local_rank(0)
        empty = inner.to_local()[:0]
        strided = [_StridedShard(0, split_factor=2), Shard(0)]
        part = (local[mine] if mine < len(local) else empty).contiguous()
        size, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(part, mesh, strided, run_check=False, shape=size, stride=stride)
    kinds: list[Placement] = [Replicate() if one == "r" else Shard(one) for one in placements]
    return distribute_tensor(tensor, mesh, kinds)


def trip(rank: int, home: Path, cases: list[Case]) -> int:
    """Save each case's tensors in one layout and restore them in the other; how many tensors were equal."""
    num_equal = 0
    state: dict[str, Any] = {}
    with checkpointer(home, state) as ckpt:
        for step, case in enumerate(cases, 1):
            mesh, other = mesh_of(*MESHES[case.mesh]), mesh_of(*MESHES[case.other_mesh])
            wholes = [content(drawn, seed) for seed, drawn in enumerate(case.tensors)]
            state.clear()
            for i, drawn in enumerate(case.tensors):
                state[f"t{i}"] = spread(placed(wholes[i].clone(), mesh, drawn.placements))
            ckpt.save(step)
            ckpt.wait()
            for i, placements in enumerate(case.others):
                state[f"t{i}"] = spread(placed(torch.zeros_like(wholes[i]), other, placements))
            assert ckpt.restore() == step
            for i, expected in enumerate(wholes):
                found = whole(bare(state[f"t{i}"]))
                assert same(found, expected), (i, case, found, expected)
                num_equal += 1
    dist.barrier()
    return num_equal


def spread(tensor: torch.Tensor) -> Any:
    """Plain tensors that are no module's are each rank's own unless the user says that they are not."""
    import holdfast

    return tensor if isinstance(tensor, DTensor) else holdfast.replicated(tensor)


def bare(entry: Any) -> torch.Tensor:
    """The tensor of an entry of the state."""
    return copy.copy(entry.value) if not isinstance(entry, torch.Tensor) else entry
