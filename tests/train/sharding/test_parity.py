"""Sharded training has the losses and gradient norms of one process, with all options."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

from elastic.conftest import Worlds
from train.sharding.parity import Curve, sharded_curve, whole_curve

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "ddp": {"shards": 1},
    "hybrid": {"shards": 2},
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": "bf16"},
    "offload": {"cpu_offload": True},
    "recompute": {"activation_checkpointing": True},
    "prefetch": {"prefetch": 2},
    "one unit": {"wrap": []},
    "by size": {"wrap": 500},
}
LEAN = [
    ("gpt", "zero3", ["plain"]),
    ("gpt", "zero2", ["recompute", "prefetch"]),
    ("gpt", "ddp", ["offload"]),
    ("gpt", "zero3", ["bf16", "recompute"]),
    ("conv", "zero3", ["by size"]),
    ("conv", "zero3", ["one unit"]),
    ("t5", "zero3", ["plain"]),
    ("t5", "zero2", ["bf16", "offload", "recompute", "prefetch"]),
]
SINGLES = [[name] for name in EXTRAS]
PAIRS = [list(pair) for pair in itertools.combinations([name for name in EXTRAS if name != "plain"], 2)]
EVERY = [
    (model, layout, extras)
    for model, layout in itertools.product(("gpt", "conv", "t5"), LAYOUTS)
    for extras in [*SINGLES, *(p for p in PAIRS if p != ["one unit", "by size"])]
]

_expected = cache(whole_curve)


def check(
    model: str, extras: list[str], share: float, found: list[tuple[Curve, float]], slack: float = 1.0
) -> None:
    """Check that all ranks have the curve of one process and hold their share."""
    loss_gap, norm_gap = (0.03, 0.06) if "bf16" in extras else (1e-5 * slack, 1e-4 * slack)
    for curve, held in found:
        assert len(curve) == len(_expected(model))
        for (loss, norm), (true_loss, true_norm) in zip(curve, _expected(model), strict=True):
            assert loss == pytest.approx(true_loss, rel=loss_gap)
            assert norm == pytest.approx(true_norm, rel=norm_gap)
        assert held == pytest.approx(share, abs=0.1)  # uneven shards


def options_of(layout: str, extras: list[str]) -> dict[str, Any]:
    options = dict(LAYOUTS[layout])
    for name in extras:
        options |= EXTRAS[name]
    return options


def run(worlds: Worlds, size: int, model: str, layout: str, extras: list[str]) -> None:
    found = worlds(size).run(sharded_curve, model, options_of(layout, extras))
    shards = LAYOUTS[layout].get("shards", size)
    check(model, extras, 1 / shards, found)


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize(("model", "layout", "extras"), LEAN, ids=str)
def test_two_ranks_train_as_one_process(worlds: Worlds, model: str, layout: str, extras: list[str]) -> None:
    run(worlds, 2, model, layout, extras)


@pytest.mark.fsdp2_on_cpu
def test_four_ranks_in_two_copies_train_as_one_process(worlds: Worlds) -> None:
    run(worlds, 4, "gpt", "hybrid", ["recompute"])


@pytest.mark.fsdp2_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("model", "layout", "extras"), EVERY, ids=str)
def test_every_pair_of_options_trains_as_one_process(
    worlds: Worlds, size: int, model: str, layout: str, extras: list[str]
) -> None:
    run(worlds, size, model, layout, extras)


@pytest.mark.fsdp2_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "t5"])
@pytest.mark.parametrize("layout", ["zero3", "ddp"])
@pytest.mark.parametrize("extras", [["plain"], ["recompute"], ["bf16"]], ids=str)
def test_compiled_blocks_train_as_one_process(
    worlds: Worlds, model: str, layout: str, extras: list[str]
) -> None:
    found = worlds(2).run(sharded_curve, model, {**options_of(layout, extras), "compile": True})
    check(model, extras, 1 / LAYOUTS[layout].get("shards", 2), found)


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "layout", "extras"), LEAN, ids=str)
def test_a_gpu_trains_as_one_process(worlds: Worlds, model: str, layout: str, extras: list[str]) -> None:
    """Train on one device, where streams, page-locked offload and prefetch are real."""
    if model == "t5":
        pytest.importorskip("transformers")  # a GPU machine without a network may lack it
    found = worlds(1).run(sharded_curve, model, options_of(layout, extras), "cuda")
    check(model, extras, 1.0, found, slack=100.0)  # the whole model was trained on the CPU
