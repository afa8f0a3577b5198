"""Filling tensors: every dtype and shape, whole, split and per-rank, only from the parts that are needed."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from faulty_store import FaultyStore
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.checkpoint.format.layout import EvenPartitioning, FillTarget, Region, whole
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.restore import fill as filling
from holdfast.checkpoint.restore.fill import region_sink, tensor_sink
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import ReadStats
from holdfast.checkpoint.state.tensors import torch_dtype
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Corrupt, InvalidInput, NotFound
from making import LocalShard, make_checkpoint, random_tensor, raw_bytes


def fill(
    store: Store,
    manifest: Manifest,
    tensors: dict[str, Any],
    rank: int,
    parts: Parts | None = None,
    **options: Any,
) -> ReadStats:
    """Fill whole tensors, or `FillTarget`s where they are regions."""
    targets = {n: [one if isinstance(one, FillTarget) else FillTarget(one)] for n, one in tensors.items()}
    return filling.fill(parts or Parts(store, manifest), targets, rank, **options)


@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if hasattr(torch, TORCH_NAMES[name])])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    store = MemoryStore()
    saved = random_tensor(torch_dtype(name), shape, seed=len(shape))
    made = make_checkpoint(store, 1, 1, [{"before": torch.ones(3, dtype=torch.int8), "t": saved}])
    target = torch.zeros(shape, dtype=saved.dtype)
    fill(store, made, {"t": target}, 0)
    assert raw_bytes(target) == raw_bytes(saved)


def test_parts_that_were_read_before_are_not_read_again() -> None:
    store = FaultyStore(MemoryStore())
    made = make_checkpoint(store, 1, 1, [{"a": torch.arange(5)}])
    parts = Parts(store, made)
    parts.part(0)
    store.clear_calls()
    fill(store, made, {"a": torch.zeros(5, dtype=torch.int64)}, 0, parts=parts)
    assert {call.name for call in store.calls()} == {names.data(1, 1, 0)}


@pytest.mark.parametrize(("rank", "source"), [(0, 0), (1, 1), (2, 0), (3, 1), (5, 1)])
def test_a_rank_gets_its_own_copy_of_a_per_rank_tensor_modulo_the_saved_world(rank: int, source: int) -> None:
    """All of it, or a region."""
    store, own = MemoryStore(), [torch.arange(8), torch.arange(8) + 10]
    ranks = [{"rng": own[0], "x": torch.zeros(1)}, {"rng": own[1]}]
    made = make_checkpoint(store, 1, 1, ranks, per_rank=["rng"])
    target, part = torch.zeros_like(own[0]), torch.zeros_like(own[0][2:5])
    fill(store, made, {"rng": target}, rank)
    fill(store, made, {"rng": FillTarget(part, Region((2,), (3,)))}, rank)
    assert torch.equal(target, own[source])
    assert torch.equal(part, own[source][2:5])


def test_unknown_names_are_listed() -> None:
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, [{"a": torch.arange(5)}])
    target = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(NotFound, match="x0, x1") as caught:
        fill(store, made, {"a": target, **{f"x{i}": target for i in range(13)}}, 0)
    assert "and 3 more" in str(caught.value)
    assert not target.any()


@pytest.mark.parametrize(
    "target", [torch.zeros(5), torch.zeros(6, dtype=torch.int64), torch.zeros(5, 2).T[0]]
)
def test_a_target_that_does_not_fit_is_refused_before_anything_changes(target: torch.Tensor) -> None:
    store = MemoryStore()
    saved = torch.arange(1, 6) if target.is_contiguous() else torch.arange(1.0, 6)
    made = make_checkpoint(store, 1, 1, [{"a": saved, "b": torch.ones(3)}])
    good = torch.zeros(3)
    with pytest.raises(InvalidInput):
        fill(store, made, {"b": good, "a": target}, 0)
    assert not good.any()
    assert not target.any()


def ranges(size: int, at: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, size, *(a for a in at if 0 < a < size)})
    return list(pairwise(edges))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(1, 5), max_size=2), min_size=3, max_size=3),
    st.sampled_from(["F32", "BF16", "BOOL", "C64", "F8_E4M3"]),
)
def test_a_tensor_split_in_any_way_comes_back_whole(
    shape: list[int], split_at: list[list[int]], dtype: str
) -> None:
    saved = random_tensor(torch_dtype(dtype), tuple(shape), seed=3)
    regions: list[list[tuple[int, int]]] = [[]]
    for dim, size in enumerate(shape):
        regions = [[*region, side] for region in regions for side in ranges(size, split_at[dim])]
    ranks: list[dict[str, LocalShard]] = []
    for region in regions:
        part = saved[tuple(slice(*side) for side in region)]
        ranks.append({"t": (part, tuple(start for start, _ in region), tuple(shape))})
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, ranks)
    target = torch.zeros(shape, dtype=saved.dtype)
    fill(store, made, {"t": target}, 0, num_threads=2)
    assert raw_bytes(target) == raw_bytes(saved)


def test_parts_that_contradict_the_manifest_are_refused() -> None:
    """A missing tensor, another region, another dtype."""
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, [{"t": torch.zeros(4)}, {"u": torch.zeros(4)}])
    tensor = made.tensors["t"]
    for fact, value, says in (
        ("partitioning", whole(1), "rank 1 did not save it"),
        ("partitioning", EvenPartitioning(((0, 2),), (0, 1)), "on this rank, found"),
        ("dtype", "I32", "I32"),
    ):
        other = made.tensors["t"] = replace(tensor, **{fact: value})
        with pytest.raises(Corrupt, match=says) as caught:
            fill(store, made, {"t": torch.zeros(4, dtype=torch_dtype(other.dtype))}, 0)
        assert caught.value.key == "t"
        made.tensors["t"] = tensor
    fill(store, made, {"t": torch.zeros(4)}, 0)


# -- regions of tensors --------------------------------------------------------------------------------------


def save_partitioned(
    store: Store,
    saved: torch.Tensor,
    partitioning: EvenPartitioning,
    *,
    frozen: bool = False,
    chunk_bytes: int = 4096,
) -> Manifest:
    """A checkpoint in which ranks hold the regions of one tensor, split by a rule."""
    shape = tuple(saved.shape)
    ranks: list[dict[str, torch.Tensor | LocalShard]] = [{} for _ in partitioning.ranks]
    for rank, region in partitioning.regions(shape):
        ranks[rank]["t"] = (saved[region.slices].contiguous(), region.offsets, shape)
    names_of = ["t"] if frozen else []
    return make_checkpoint(
        store, 1, 1, ranks, partitionings={"t": partitioning}, frozen=names_of, chunk_bytes=chunk_bytes
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], EvenPartitioning, list[Region]]:
    """A shape, a partitioning of it, and wanted regions, among them empty ones and single elements."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    split = st.tuples(st.integers(0, max(len(shape) - 1, 0)), st.integers(1, 3))
    splits = draw(st.lists(split, max_size=3 if shape else 0))
    ranks = draw(st.permutations(range(math.prod(parts for _, parts in splits))))
    wanted = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sides = zip(shape, offsets, strict=True)
        wanted.append(Region(offsets, tuple(draw(st.integers(0, size - at)) for size, at in sides)))
    return shape, EvenPartitioning(tuple(splits), tuple(ranks)), wanted


@settings(max_examples=60)
@given(cases(), st.sampled_from(["F32", "BF16", "BOOL", "C64"]), st.booleans())
def test_any_region_of_a_tensor_equals_the_same_slice_of_the_whole(
    case: tuple[tuple[int, ...], EvenPartitioning, list[Region]], dtype: str, frozen: bool
) -> None:
    shape, partitioning, wanted = case
    saved = random_tensor(torch_dtype(dtype), shape, seed=5)
    store = MemoryStore()
    made = save_partitioned(store, saved, partitioning, frozen=frozen)
    for region in wanted:
        target = torch.zeros(region.sizes, dtype=saved.dtype)
        fill(store, made, {"t": FillTarget(target, region)}, 0, num_threads=2)
        assert raw_bytes(target) == raw_bytes(saved[region.slices])


@settings(max_examples=40)
@given(cases())
def test_regions_of_other_ranks_are_not_read(
    case: tuple[tuple[int, ...], EvenPartitioning, list[Region]],
) -> None:
    """Parts and data files of ranks without requested bytes are not read."""
    shape, partitioning, wanted = case
    store = FaultyStore(MemoryStore())
    made = save_partitioned(store, random_tensor(torch.float32, shape), partitioning)
    for region in wanted:
        store.clear_calls()
        fill(store, made, {"t": FillTarget(torch.zeros(region.sizes), region)}, 0)
        needed = {rank for rank, _ in partitioning.touching(region, shape)} if region.num_items else set()
        assert {call.name for call in store.calls("get")} == {names.part(1, 1, rank) for rank in needed}
        assert {call.name for call in store.calls("read_into")} == {names.data(1, 1, rank) for rank in needed}


@pytest.mark.parametrize("num_saved", [1, 2, 4])
@pytest.mark.parametrize("num_loading", [1, 3, 8])
def test_another_number_of_ranks_reads_little_more_than_the_tensor(num_saved: int, num_loading: int) -> None:
    """Split along the first dimension, each rank reads its rows and at most a chunk more at either end."""
    saved = torch.randn(1000, 64)
    store = MemoryStore()
    made = save_partitioned(store, saved, EvenPartitioning(((0, num_saved),), tuple(range(num_saved))))
    loading = EvenPartitioning(((0, num_loading),), tuple(range(num_loading)))
    for _, region in loading.regions((1000, 64)):
        target = torch.zeros(region.sizes)
        stats = fill(store, made, {"t": FillTarget(target, region)}, 0)
        assert torch.equal(target, saved[region.slices])
        num_files = len(list(made.tensors["t"].partitioning.touching(region, (1000, 64))))  # pyright: ignore
        assert target.nbytes <= stats.num_bytes <= target.nbytes + num_files * 2 * 4096


def test_columns_are_read_with_the_rows_that_they_are_in_and_no_others() -> None:
    saved = torch.randn(64, 32, 32)
    store = MemoryStore()
    made = save_partitioned(store, saved, EvenPartitioning((), (0,)))
    region = Region((10, 4, 8), (2, 3, 5))
    target = torch.zeros(region.sizes)
    stats = fill(store, made, {"t": FillTarget(target, region)}, 0)
    assert torch.equal(target, saved[region.slices])
    assert stats.num_bytes <= 2 * 32 * 32 * 4 + 4096
    one_row = Region((10, 4, 8), (1, 3, 5))
    stats = fill(store, made, {"t": FillTarget(torch.zeros(one_row.sizes), one_row)}, 0)
    assert stats.num_bytes == 4096, "the rows of the second dimension are enough"


def test_frozen_and_other_tensors_of_a_rank_come_from_their_two_files() -> None:
    store = FaultyStore(MemoryStore())
    held = {"w": torch.randn(30), "base": torch.randn(500), "n": torch.arange(7)}
    made = make_checkpoint(store, 1, 1, [held], frozen=["base"], tied={"alias": "base"})
    for wanted, files in (
        (["w", "n"], {names.data(1, 1, 0)}),
        (["base"], {names.frozen(1, 1, 0)}),
        (["w", "base", "alias"], {names.data(1, 1, 0), names.frozen(1, 1, 0)}),
    ):
        store.clear_calls()
        targets = {name: torch.zeros_like(held[made.tied.get(name, name)]) for name in wanted}
        fill(store, made, targets, 0)
        assert {call.name for call in store.calls("read_into")} == files
        assert all(torch.equal(one, held[made.tied.get(name, name)]) for name, one in targets.items())


@pytest.mark.parametrize(
    "region",
    [
        Region((0,), (5,)),
        Region((3,), (2,)),
        Region((0,), (1,)),
        Region((-1,), (2,)),
        Region((0, 0), (2, 1)),
        Region((), ()),
    ],
)
def test_a_region_that_does_not_fit_is_refused_before_anything_changes(region: Region) -> None:
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, [{"a": torch.ones(4), "b": torch.ones(3)}])
    good, target = torch.zeros(3), torch.zeros(2)
    with pytest.raises(InvalidInput, match="Nothing was changed") as caught:
        fill(store, made, {"b": good, "a": FillTarget(target, region)}, 0)
    assert caught.value.key == "a"
    assert not good.any()
    assert not target.any()


def test_sinks_write_at_their_base() -> None:
    tensor = torch.zeros(8, dtype=torch.int16)
    tensor_sink(tensor, base=4)(2, memoryview(bytearray(b"\x01\x00\x02\x00")))
    assert tensor.tolist() == [0, 0, 0, 1, 2, 0, 0, 0]


def test_a_region_is_placed_only_when_it_is_complete() -> None:
    """Rows 0 and 1 of three columns come; the last two of these go into the first two of the tensor."""
    tensor = torch.zeros(2, 4, dtype=torch.uint8)
    place, wanted, rows = Region((0, 1), (2, 4)), Region((0, 1), (2, 2)), Region((0, 0), (2, 3))
    sink = region_sink(tensor, place, wanted, rows)
    sink(3, memoryview(bytearray([4, 5, 6])))
    assert not tensor.any()
    sink(0, memoryview(bytearray([1, 2, 3])))
    assert tensor.tolist() == [[2, 3, 0, 0], [5, 6, 0, 0]]


@pytest.mark.gpu
def test_cuda_tensors_are_filled() -> None:
    store = MemoryStore()
    saved = torch.randn(300, 40)
    made = make_checkpoint(store, 1, 1, [{"w": saved, "step": torch.tensor(3.0)}], chunk_bytes=4096)
    targets = {"w": torch.zeros(300, 40, device="cuda"), "step": torch.tensor(0.0, device="cuda")}
    fill(store, made, targets, 0)
    assert torch.equal(targets["w"].cpu(), saved)
    assert targets["step"].item() == 3.0
