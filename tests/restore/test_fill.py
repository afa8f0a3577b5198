"""Filling tensors: every dtype and shape, whole, split and per-rank, only from the parts that are needed."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Corrupt, InvalidInput, NotFound
from holdfast.format import names
from holdfast.format.dtypes import TORCH_NAMES
from holdfast.restore.fill import RegionSink, TensorSink, fill, torch_dtype
from holdfast.restore.parts import Parts
from holdfast.store.memory import MemoryStore
from making import Region, make_checkpoint, raw_bytes


class Recorder(MemoryStore):
    """Remembers what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def get(self, name: str) -> bytes:
        self.asked.append(name)
        return super().get(name)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits of any dtype (0 and 1 for bool)."""
    count = math.prod(shape) * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, top, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    store = MemoryStore()
    saved = random_tensor(torch_dtype(name), shape, seed=len(shape))
    made = make_checkpoint(store, 1, 1, [{"before": torch.ones(3, dtype=torch.int8), "t": saved}])
    target = torch.zeros(shape, dtype=saved.dtype)
    fill(store, made, {"t": target}, 0)
    assert raw_bytes(target) == raw_bytes(saved)


def test_a_parameter_is_filled_in_place() -> None:
    store = MemoryStore()
    saved = torch.randn(300, 40)
    made = make_checkpoint(store, 1, 1, [{"w": saved}], chunk_bytes=4096)
    parameter = torch.nn.Parameter(torch.zeros(300, 40))
    address = parameter.data_ptr()
    fill(store, made, {"w": parameter}, 0)
    assert torch.equal(parameter.detach(), saved)
    assert parameter.data_ptr() == address


def test_only_the_parts_that_hold_something_wanted_are_read() -> None:
    store = Recorder()
    tensors = [{"a": torch.arange(5)}, {"b": torch.arange(6)}, {"c": torch.arange(7)}]
    made = make_checkpoint(store, 1, 1, tensors)
    store.asked.clear()
    target = torch.zeros(6, dtype=torch.int64)
    fill(store, made, {"b": target}, 0)
    assert torch.equal(target, torch.arange(6))
    assert {name for name in store.asked if name.endswith(".json")} == {names.part(1, 1, 1)}
    assert {name for name in store.asked if name.endswith(".safetensors")} == {names.data(1, 1, 1)}


def test_parts_that_were_read_before_are_not_read_again() -> None:
    store = Recorder()
    made = make_checkpoint(store, 1, 1, [{"a": torch.arange(5)}])
    parts = Parts(store, made)
    parts.part(0)
    store.asked.clear()
    fill(store, made, {"a": torch.zeros(5, dtype=torch.int64)}, 0, parts=parts)
    assert store.asked == [names.data(1, 1, 0)]


@pytest.mark.parametrize(("rank", "source"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_a_rank_gets_its_own_copy_of_a_per_rank_tensor_modulo_the_saved_world(rank: int, source: int) -> None:
    store = MemoryStore()
    own = [{"rng": torch.full((4,), 10 + r), "x": torch.zeros(1)} if r == 0 else {"rng": torch.full((4,), 11)}
           for r in (0, 1)]  # fmt: skip
    made = make_checkpoint(store, 1, 1, own, per_rank=["rng"])
    target = torch.zeros(4, dtype=torch.int64)
    fill(store, made, {"rng": target}, rank)
    assert target.tolist() == [10 + source] * 4


def test_ranks_may_differ_in_the_shape_of_a_per_rank_tensor() -> None:
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, [{"t": torch.arange(3)}, {"t": torch.arange(8)}], per_rank=["t"])
    target = torch.zeros(8, dtype=torch.int64)
    fill(store, made, {"t": target}, 1)
    assert torch.equal(target, torch.arange(8))


def test_an_alias_is_filled_from_what_it_is_tied_to() -> None:
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, [{"a": torch.arange(5)}], tied={"b": "a"})
    first, second = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    fill(store, made, {"a": first, "b": second}, 0)
    assert torch.equal(first, second)
    assert torch.equal(first, torch.arange(5))


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


def cuts(size: int, at: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, size, *(a for a in at if 0 < a < size)})
    return list(pairwise(edges))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(1, 5), max_size=2), min_size=3, max_size=3),
    st.sampled_from(["F32", "BF16", "BOOL", "C64", "F8_E4M3"]),
)
def test_a_tensor_split_in_any_way_comes_back_whole(
    shape: list[int], cut_at: list[list[int]], dtype: str
) -> None:
    saved = random_tensor(torch_dtype(dtype), tuple(shape), seed=3)
    boxes: list[list[tuple[int, int]]] = [[]]
    for dim, size in enumerate(shape):
        boxes = [[*box, side] for box in boxes for side in cuts(size, cut_at[dim])]
    ranks: list[dict[str, Region]] = []
    for box in boxes:
        region = saved[tuple(slice(*side) for side in box)]
        ranks.append({"t": (region, tuple(start for start, _ in box), tuple(shape))})
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, ranks)
    target = torch.zeros(shape, dtype=saved.dtype)
    fill(store, made, {"t": target}, 0, num_threads=2)
    assert raw_bytes(target) == raw_bytes(saved)


def test_a_large_column_split_arrives_through_many_chunks() -> None:
    saved = torch.randn(600, 64)
    ranks: list[dict[str, Region]] = [
        {"t": (saved[:, at : at + 32].contiguous(), (0, at), (600, 64))} for at in (0, 32)
    ]
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, ranks, chunk_bytes=4096)
    target = torch.zeros(600, 64)
    fill(store, made, {"t": target}, 0)
    assert torch.equal(target, saved)


def test_parts_that_contradict_the_manifest_are_refused() -> None:
    store = MemoryStore()
    made = make_checkpoint(store, 1, 1, [{"t": torch.zeros(4)}, {"u": torch.zeros(4)}])
    object.__setattr__(made.tensors["t"], "owner", 1)
    with pytest.raises(Corrupt, match="did not save"):
        fill(store, made, {"t": torch.zeros(4)}, 0)


def test_sinks_write_at_their_base() -> None:
    tensor = torch.zeros(8, dtype=torch.int16)
    TensorSink(tensor, base=4).write(2, memoryview(bytearray(b"\x01\x00\x02\x00")))
    assert tensor.tolist() == [0, 0, 0, 1, 2, 0, 0, 0]


def test_a_region_is_placed_only_when_it_is_complete() -> None:
    from holdfast.format.layout import Piece

    tensor = torch.zeros(2, 4, dtype=torch.uint8)
    sink = RegionSink(tensor, Piece("t", "U8", (2, 4), (0, 1), (2, 2)))
    sink.write(2, memoryview(bytearray([3, 4])))
    assert not tensor.any()
    sink.write(0, memoryview(bytearray([1, 2])))
    assert tensor.tolist() == [[0, 1, 2, 0], [0, 3, 4, 0]]


@pytest.mark.gpu
def test_cuda_tensors_are_filled() -> None:
    store = MemoryStore()
    saved = torch.randn(300, 40)
    made = make_checkpoint(store, 1, 1, [{"w": saved, "step": torch.tensor(3.0)}], chunk_bytes=4096)
    targets = {"w": torch.zeros(300, 40, device="cuda"), "step": torch.tensor(0.0, device="cuda")}
    fill(store, made, targets, 0)
    assert torch.equal(targets["w"].cpu(), saved)
    assert targets["step"].item() == 3.0
