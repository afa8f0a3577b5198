"""Shardings read from tensors, compared with the regions that torch computes for each rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast import per_rank
from holdfast.checkpoint.format.layout import EvenPartitioning, Region
from holdfast.checkpoint.state import Sharding, State, assign, local_of, sharding_of
from holdfast.errors import InvalidInput, Unsupported
from state.trip import Stateful, fake_ranks, kept, step_once

WORLD = 12
_shape_and_offset: Any = getattr(_utils, "_compute_local_shape_and_global_offset", None)
pytestmark = pytest.mark.skipif(not _shape_and_offset, reason="torch 2.6 has no function to compare with")


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with fake_ranks(5, WORLD):
        yield


def _mesh(ranks: Any) -> DeviceMesh:
    return DeviceMesh("cpu", torch.as_tensor(ranks), _init_backend=False)


def _tensor(mesh: DeviceMesh, placements: Any, shape: tuple[int, ...]) -> DTensor:
    """A DTensor as rank 5 would hold it."""
    coordinate = mesh.get_coordinate()
    local = (0,) * len(shape)
    if coordinate is not None:
        local, _ = _shape_and_offset(shape, tuple(mesh.shape), list(coordinate), placements)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, torch.float32)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(torch.zeros(local), spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def _sharding(tensor: torch.Tensor) -> Sharding:
    found = sharding_of(tensor)
    assert found is not None
    return found


@st.composite
def _meshes(draw: Any) -> torch.Tensor:
    """Ranks of a mesh with up to three dims: any ranks, in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= WORLD))
    ranks = draw(st.permutations(range(WORLD)))[: math.prod(sizes)]
    return torch.tensor(ranks).reshape(sizes)


def _assert_regions_are_torchs(ranks: torch.Tensor, placements: Any, shape: tuple[int, ...]) -> None:
    sharding = _sharding(_tensor(_mesh(ranks), placements, shape))
    assert sharding.layout.holders == set(ranks.flatten().tolist())
    for coordinate in itertools.product(*map(range, ranks.shape)):
        sizes, offsets = _shape_and_offset(shape, tuple(ranks.shape), list(coordinate), placements)
        (region,) = sharding.regions_of(int(ranks[coordinate]))
        assert region.sizes == sizes
        assert region.offsets == offsets or not region.num_items
    for copy in range(len(sharding.layout.copies)):
        times = torch.zeros(shape, dtype=torch.int)
        for _, region in sharding.layout.partitionings[copy].regions(shape):
            times[region.slices] += 1
        assert bool((times == 1).all())


@given(_meshes(), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_regions_equal_those_of_torch(ranks: torch.Tensor, shape: list[int], data: Any) -> None:
    """Any mesh, any placements, even and uneven; every copy covers the tensor once."""
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(lambda dim: Shard(dim)))
    placements = data.draw(st.lists(placement, min_size=ranks.ndim, max_size=ranks.ndim))
    _assert_regions_are_torchs(ranks, placements, tuple(shape))


@given(_meshes(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_strided_regions_are_those_of_torch(ranks: torch.Tensor, rows: int, columns: int, data: Any) -> None:
    """Mesh dims that split rows in any order, as strided shards do; evenly, since torch requires it."""
    order: list[int] = data.draw(st.permutations(range(ranks.ndim)))
    chosen = data.draw(st.sets(st.sampled_from(range(ranks.ndim)), min_size=1))
    order = [dim for dim in order if dim in chosen]
    placements: list[Any] = [Replicate()] * ranks.ndim
    for at, dim in enumerate(order):
        factor = math.prod(ranks.shape[other] for other in order[:at] if other > dim)
        placements[dim] = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
    _assert_regions_are_torchs(ranks, placements, (rows * ranks.numel(), columns))


def test_replicated_mesh_dimensions_are_copies() -> None:
    """HSDP over a mesh with a dim of one rank."""
    tensor = _tensor(_mesh([[[0, 1]], [[5, 4]]]), [Replicate(), Shard(1), Shard(0)], (5, 2))
    sharding = _sharding(tensor)
    assert sharding.layout.splits == ((0, 2),)
    assert sharding.layout.copies == ((0, 1), (5, 4))
    assert sharding.layout.partitionings[1] == EvenPartitioning(((0, 2),), (5, 4))
    assert sharding.layout.partitionings[1] is sharding.layout.partitionings[1]


def test_a_local_tensor_shares_memory() -> None:
    """No operation of DTensor's runs, which might communicate."""
    tensor = _tensor(_mesh(list(range(WORLD))), [Shard(0)], (24,))
    local_of(tensor).fill_(3)
    assert tensor.to_local().tolist() == [3, 3]
    plain = torch.zeros(2)
    assert local_of(plain) is plain
    assert sharding_of(plain) is None


def test_pending_sums_are_refused() -> None:
    """A Partial has no bytes that could be saved."""
    tensor = _tensor(_mesh([4, 5]), [Partial()], (4,))
    with pytest.raises(Unsupported, match=r"x.a cannot be saved: .*pending"):
        State({"x": {"a": tensor}})


def test_a_rank_outside_a_mesh_has_no_region() -> None:
    """What others hold is theirs; what this rank holds in the same state is still saved."""
    there = _tensor(_mesh([0, 1]), [Shard(0)], (4,))
    here = _tensor(_mesh([5, 6]), [Shard(0)], (5,))
    state = State({"there": there, "here": here})
    captured = state.capture()
    assert set(captured.tensors) == {"here", "rng.torch"}
    assert captured.tensors["here"].shape == (3,)
    assert captured.structure.shardings.keys() == {"here"}
    assert state.capture().structure is captured.structure


def test_tied_sharded_tensors_stay_tied_even_if_empty_on_this_rank() -> None:
    """A tie is the same on all ranks: it goes by the object, not by its memory."""
    tensor = _tensor(_mesh(list(range(WORLD))), [Shard(0)], (3,))
    assert not local_of(tensor).numel()
    captured = State({"a": tensor, "b": [tensor]}).capture()
    assert captured.structure.tied == {"b.0": "a"}


def test_a_local_tensor_that_does_not_match_its_placements_is_refused() -> None:
    """Otherwise a checkpoint would have holes."""
    tensor = _tensor(_mesh([5, 6]), [Shard(0)], (4,))
    tensor._local_tensor = torch.zeros(3)
    with pytest.raises(Unsupported, match=r"part here is \[3\], but its placements require \[2\]"):
        State({"x": tensor})


def test_a_changed_layout_is_detected() -> None:
    """Same object, same local shape and bytes, another mesh: another structure."""
    tensor = _tensor(_mesh([5, 6]), [Shard(0)], (4,))
    state = State({"x": tensor})
    first = state.capture()
    assert state.capture().structure is first.structure
    tensor._spec = _tensor(_mesh([6, 5]), [Shard(0)], (4,))._spec
    second = state.capture()
    assert second.structure is not first.structure
    assert second.structure.shardings["x"].layout.copies == ((6, 5),)


def test_equal_layouts_share_one_object() -> None:
    """So that thousands of tensors cost a few partitionings."""
    tensors = [_tensor(_mesh([5, 6]), [Shard(0)], (4, i)) for i in range(1, 4)]
    captured = State({"x": tensors}).capture()
    assert len({id(s.layout) for s in captured.structure.shardings.values()}) == 1
    partitionings = assign(dict.fromkeys(captured.structure.shardings, 8), captured.structure.shardings)
    assert len(partitionings) == 3
    assert len({id(one) for one in partitionings.values()}) == 1


def _rows() -> DTensor:
    """Rank 5 holds the second half of the rows."""
    return _tensor(_mesh([6, 5]), [Shard(0)], (4, 4))


_SHAPES: dict[str, Any] = {
    "rows": (_rows, lambda whole: whole[2:]),
    "columns": (lambda: _tensor(_mesh([5, 6]), [Shard(1)], (4, 4)), lambda whole: whole[:, :2]),
    "columns again": (lambda: _tensor(_mesh([5, 6]), [Shard(1)], (4, 4)), lambda whole: whole[:, :2]),
    "whole": (lambda: torch.zeros(4, 4), lambda whole: whole),
    "bfloat16": (lambda: _as_bfloat16(_rows()), lambda whole: whole[2:].bfloat16()),
}


def _as_bfloat16(tensor: DTensor) -> DTensor:
    """Also not contiguous."""
    local = torch.zeros(4, 2, dtype=torch.bfloat16).t()
    spec = tensor._spec
    meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.bfloat16)
    new = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, new, requires_grad=False)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("pair", list(itertools.permutations(_SHAPES, 2)))
def test_one_saved_tensor_fills_two_live_ones_with_different_shardings(pair: tuple[str, str]) -> None:
    """A tie of the checkpoint that the live state does not have: read once, whole only if it must be."""
    tensor = torch.arange(16.0).reshape(4, 4)
    saved = kept({"x": tensor, "y": [tensor]})
    assert saved.tied == {"y.0": "x"}
    live = [_SHAPES[kind][0]() for kind in pair]
    keep = [local_of(one) for one in live]
    load = saved.restore(State({"x": live[0], "y": [live[1]]}))
    assert set(load.targets) == {"x", "rng.torch"}
    for kind, local in zip(pair, keep, strict=True):
        assert torch.equal(local, _SHAPES[kind][1](tensor)), kind


def test_only_the_region_of_this_rank_is_requested() -> None:
    """In place, with its region; of an empty part nothing."""
    saved = kept({"x": torch.arange(16.0).reshape(4, 4), "e": torch.zeros(2), "o": torch.zeros(3)})
    empty, outside = (_tensor(_mesh(ranks), [Shard(0)], (n,)) for ranks, n in (([0, 1, 5], 2), ([0, 1], 3)))
    live = {"x": _rows(), "e": empty, "o": outside}
    load = saved.plan(State(dict(live)))
    assert set(load.targets) == {"x", "rng.torch"}
    (target,) = load.targets["x"]
    assert target.region == Region((2, 0), (2, 4))
    assert target.tensor.data_ptr() == local_of(live["x"]).data_ptr()
    saved.restore(State(dict(live)))
    assert live["x"].to_local()[0, 0] == 8


def test_a_different_global_shape_is_refused() -> None:
    """Though the local shapes agree."""
    saved = kept({"x": torch.zeros(2, 4)})
    with pytest.raises(InvalidInput, match=r"\[4, 4\] in the live state but \[2, 4\]"):
        saved.plan(State({"x": _rows()}))


def test_load_state_dict_receives_dtensors() -> None:
    """As wrappers of models and optimizers have them. The object is not touched while the load is planned."""
    whole = torch.arange(16.0).reshape(4, 4)
    saved = kept({"w": Stateful({"nested": {"tensor": whole}, "plain": torch.ones(2)})})
    wrapper, rows = Stateful({"nested": {"tensor": _rows()}, "plain": torch.zeros(2)}), _rows()
    state = State({"w": wrapper})
    assert state.capture().structure.shardings["w.nested.tensor"].layout.copies == ((6, 5),)
    load = saved.plan(state)
    assert load.targets["w.nested.tensor"][0].region == Region((2, 0), (2, 4))
    saved.fill(load)
    assert not wrapper.state["nested"]["tensor"].to_local().any()
    load.finish()
    found = wrapper.state["nested"]["tensor"]
    assert isinstance(found, DTensor)
    assert found._spec == rows._spec
    assert torch.equal(found.to_local(), whole[2:])
    assert wrapper.state["plain"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("offsets", "inside", "sizes", "why"),
    [
        (((0,), (0,)), ((0,), (2,)), ((2,), (2,)), "do not lie in the global tensor.*each once"),
        (((0,), (6,)), ((0,), (2,)), ((2,), (3,)), "do not lie in the global tensor"),
        (((6,),), ((0,),), ((4,),), "do not lie in the global tensor"),
        (((0,),), ((2,),), ((4,),), "do not lie in the global tensor"),
        (((0,),), ((0, 0),), ((4,),), "do not lie in the global tensor"),
        (((0,),), ((0,),), (), "do not lie in the global tensor"),
        (0, 0, 4, "do not lie in the global tensor"),
    ],
)
def test_shard_attributes_of_a_tensor_are_checked(offsets: Any, inside: Any, sizes: Any, why: str) -> None:
    """Torch 2.14's CheckpointableTensor. With per_rank() each rank's tensor is saved as it is."""
    tensor: Any = torch.arange(4.0)
    tensor.global_shape, tensor.global_offsets = (8,), offsets
    tensor.local_offsets, tensor.local_sizes = inside, sizes
    with pytest.raises(Unsupported, match=f"w cannot be saved: .*{why}.*Nothing was written"):
        State({"w": tensor}).capture()
    assert State({"w": per_rank({"x": tensor})}).capture().tensors["w.x"].shape == (4,)


def test_optimizer_state_that_does_not_show_its_shards_is_refused_at_each_capture() -> None:
    weight: Any = torch.nn.Parameter(torch.ones(4))
    optimizer = step_once(torch.optim.SGD([weight], momentum=0.9))
    weight.global_shape, weight.global_offsets = (8,), ((4,),)
    weight.local_offsets, weight.local_sizes = ((0,),), ((4,),)
    state = State({"weight": weight, "optimizer": optimizer})
    for _ in range(2):
        with pytest.raises(Unsupported, match="its parameter holds a shard of a global tensor"):
            state.capture()


@pytest.mark.parametrize("kind", ["complex128", "sparse"])
def test_shards_in_a_tensor_that_is_saved_as_others_are_refused(kind: str) -> None:
    """Each rank's would have been taken for a copy of the same tensor."""
    tensor: Any = torch.arange(4.0)
    tensor = tensor.to_sparse() if kind == "sparse" else tensor.to(torch.complex128)
    tensor.global_shape, tensor.global_offsets = (8,), ((4,),)
    tensor.local_offsets, tensor.local_sizes = ((0,),), ((4,),)
    with pytest.raises(Unsupported, match="w cannot be saved: its global_shape shows shards of a global"):
        State({"w": tensor}).capture()
