"""Values of a checkpoint: what is not finite is found, and norms out of reason are named."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.checkpoint.format.layout import Shard, lay_out
from holdfast.checkpoint.format.sections import UNKNOWN, Health, Mark, Section, health_of
from holdfast.system.documents import to_plain
from holdfast.watch.values import ContentCheck, Squares, TensorHealth, judge
from making import raw_bytes

NAMES = {
    getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items() if hasattr(torch, torch_name)
}
SUMMED = (torch.float64, torch.float32, torch.bfloat16)
SMALL = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def image_of(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return a data file of some tensors."""
    shards = [Shard.whole(name, NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()]
    layout = lay_out(shards, 0)
    image = bytearray(layout.file_bytes)
    image[: len(layout.header)] = layout.header
    for (_, tensor), start in zip(tensors.items(), layout.starts, strict=True):
        raw = raw_bytes(tensor)
        image[start : start + len(raw)] = raw
    return bytes(image)


def check(tensors: dict[str, torch.Tensor], chunk_bytes: int = 4096) -> TensorHealth:
    image = memoryview(image_of(tensors))
    found = ContentCheck(image)
    for start in range(0, len(image), chunk_bytes):
        found.add(start, min(start + chunk_bytes, len(image)))
    return found.result()


def values(number: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, generator=generator).clamp(-3, 3).to(dtype)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(SUMMED), st.integers(0, 3000)), min_size=1, max_size=6),
    st.sampled_from([4096, 32 << 10, 1 << 20]),
)
def test_sums_of_squares_are_those_of_torch(kinds: list[tuple[torch.dtype, int]], chunk_bytes: int) -> None:
    tensors = {f"model.{i}": values(number, dtype, i) for i, (dtype, number) in enumerate(kinds)}
    moments = {
        f"opt.state.model.{i}.exp_avg": values(number, dtype, 99) for i, (dtype, number) in enumerate(kinds)
    }
    found = check({**tensors, **moments, "opt.state.model.0.step": torch.tensor(1e9)}, chunk_bytes)
    assert found.num_bad == 0
    for total, group in ((found.squares.parameters, tensors), (found.squares.moments, moments)):
        expected = math.fsum(float((one.double() ** 2).sum()) for one in group.values())
        assert (total or 0.0) == pytest.approx(expected, rel=1e-4)


@settings(max_examples=40)
@given(
    st.sampled_from((*SUMMED, *SMALL)),
    st.integers(1, 3000),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.data(),
)
def test_one_bad_element_names_its_tensor(
    dtype: torch.dtype, number: int, value: float, data: st.DataObject
) -> None:
    bad = values(number, torch.float32).abs().clamp(min=0.5)
    bad[data.draw(st.integers(0, number - 1))] = value
    bad = bad.to(dtype)
    if dtype is torch.float8_e4m3fn and math.isinf(value):
        bad = torch.full((number,), math.nan).to(dtype)  # it has no infinity
    tensors = {"a": values(100, dtype), "bad": bad, "c": values(1000, dtype)}
    is_mask = number == 1 and bool(torch.isinf(bad.float()).all())
    assert check(tensors).bad == (() if is_mask else ("bad",))


@pytest.mark.parametrize("dtype", [*SUMMED, *SMALL])
def test_every_finite_bit_pattern_is_good(dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        patterns = torch.arange(256, dtype=torch.uint8).view(dtype)
    else:
        patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
        patterns = patterns.view(dtype) if dtype.itemsize == 2 else patterns.to(dtype)
    exact = patterns.float()  # torch 2.6 cannot index all types of 8 bits
    finite = torch.isfinite(exact)
    assert check({"w": exact[finite].to(dtype)}).num_bad == 0
    for one in exact[~finite][:: max(1, int((~finite).sum()) // 20)]:
        assert check({"w": torch.stack([one, torch.tensor(1.0)]).to(dtype)}).num_bad == 1


def test_huge_values_are_finite_though_their_squares_are_not() -> None:
    found = check({"w": torch.tensor([3e38, -3e38]), "d": torch.tensor([1e300], dtype=torch.float64)})
    assert found.num_bad == 0
    assert found.squares.parameters is None


def test_parameters_may_not_hold_infinities() -> None:
    """SGD turns a bias of zeros into infinities by one infinite gradient."""
    lost = torch.full((4,), -math.inf)
    assert check({"fc.bias": lost}).bad == ("fc.bias",)
    moments = {"opt.state.gain.exp_avg": values(4, torch.float32)}
    assert check({"gain": lost, **moments}).bad == ("gain",)
    assert check({"gain": lost}).bad == ()  # it may be a mask


def test_masks_may_hold_infinities_and_optimizers_may_not() -> None:
    mask = torch.full((100, 1000), -math.inf).triu(1)
    tensors = {"attn.mask": mask, "best": torch.tensor(math.inf), "w": values(10, torch.float32)}
    assert check(tensors).num_bad == 0
    found = check({**tensors, "opt.state.w.exp_avg_sq": torch.tensor([math.inf, 0.0])})
    assert found.bad == ("opt.state.w.exp_avg_sq",)
    assert check({"attn.mask": torch.where(mask == 0, 1.0, mask)}).bad == ("attn.mask",)
    assert check({"attn.mask": torch.where(mask == 0, math.nan, mask)}).bad == ("attn.mask",)


def test_integers_are_not_checked() -> None:
    assert check({"n": torch.tensor([0x7F800000], dtype=torch.int32)}) == TensorHealth(0, (), Squares())


def test_many_bad_tensors_are_counted_and_some_named() -> None:
    found = check({f"w{i}": torch.tensor([math.nan]) for i in range(20)})
    assert found.num_bad == 20
    assert len(found.bad) == 8


FINE = TensorHealth(0, (), Squares(100.0, 1.0))
BEFORE = [Squares(100.0, 1.0)] * 3
STEADY, SPIKE, FEW = (
    Section(1, {}, Mark.FOR, ("loss is within reason",)),
    Section(1, {}, Mark.AGAINST, ("loss is 9",)),
    Section(1, {}, Mark.NONE, ("few values",)),
)


def health(tensors: list[TensorHealth | None], trend: Section | None, before: list[Squares]) -> Health:
    """Health by the values and the trend of the metrics."""
    sections = {"finite-values": judge(tensors, before)}
    return health_of(sections if trend is None else {**sections, "spike": trend})


@pytest.mark.parametrize(
    ("tensors", "trend", "before", "healthy"),
    [
        ([FINE, FINE], STEADY, [], True),
        ([FINE], None, BEFORE, True),  # nothing is recorded, but the norms are within reason
        ([FINE], FEW, [], None),
        ([FINE], None, [], None),
        ([FINE, None], STEADY, BEFORE, None),
        ([FINE], SPIKE, BEFORE, False),
        ([FINE, TensorHealth(1, ("w",), FINE.squares)], STEADY, BEFORE, False),
        ([None, TensorHealth(1, ("w",), Squares())], None, [], False),  # one bad tensor is enough
        ([TensorHealth(0, (), Squares(1e6, 1.0))], STEADY, BEFORE, False),
        ([TensorHealth(0, (), Squares(1e-6, 1.0))], STEADY, BEFORE, False),
        ([TensorHealth(0, (), Squares(1e6, 1.0))], STEADY, BEFORE[:2], True),  # too few to compare with
        ([TensorHealth(0, (), Squares(100.0, 1e6))], STEADY, BEFORE, False),
        ([TensorHealth(0, (), Squares(100.0, 0.0))], STEADY, BEFORE, True),  # gradients may become small
        ([TensorHealth(0, (), Squares())], STEADY, [Squares()] * 3, True),  # nothing to sum up
    ],
)
def test_a_state_is_healthy_if_all_is_known_and_nothing_is_wrong(
    tensors: list[TensorHealth | None], trend: Section | None, before: list[Squares], healthy: bool | None
) -> None:
    assert health(tensors, trend, before).healthy is healthy


def test_the_reasons_name_tensors_and_norms() -> None:
    bad = TensorHealth(12, tuple(f"w{i}" for i in range(8)), Squares(1e6, 1.0))
    assert health([bad], SPIKE, BEFORE).reasons == (
        "NaN or infinity in w0, w1, w2, w3, w4, w5, w6, w7 and 4 more",
        "the norm of the parameters is 1000, usually 10",
        "loss is 9",
    )


@given(st.permutations([FINE, TensorHealth(0, (), Squares(3.0, None)), TensorHealth(0, (), Squares())]))
def test_norms_are_those_of_all_ranks(tensors: list[TensorHealth]) -> None:
    assert judge(tensors).data["squares"] == to_plain(Squares(103.0, 1.0))


def test_of_several_marks_the_greatest_counts_in_any_order() -> None:
    words = {Mark.NONE: "unknown", Mark.FOR: "healthy", Mark.UNSURE: "unknown", Mark.AGAINST: "unhealthy"}
    for marks in itertools.product(Mark, repeat=3):
        sections = {f"w{i}": Section(1, {}, mark, (mark.name,)) for i, mark in enumerate(marks)}
        found = health_of(sections)
        assert found.word == words[max(marks)]
        if found.healthy is False:
            assert set(found.reasons) == {"AGAINST"}
    assert health_of({}) == UNKNOWN
