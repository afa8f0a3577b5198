"""A run goes on under other knobs and on other numbers of ranks, and its curve has no step in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from elastic.conftest import Worlds
from train.sharding.models import make
from train.sharding.parity import Curve, optimizer_of, train, whole_curve

pytestmark = pytest.mark.ranks

STEPS = 2
CHAIN: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (1, {"keep": True}),
    (4, {"shards": 2, "recompute": True}),
    (2, {"shards": 1, "offload": True}),
    (4, {"at": [], "prefetch": 1}),
    (2, {"at": 500, "recompute": True, "keep": True}),
]


def go_on(rank: int, name: str, home: Path, link: int, knobs: dict[str, Any]) -> Curve:
    """Restore what the link before saved, train, save."""
    model = holdfast.shard(make(name), **knobs, quiet=True)
    optimizer = optimizer_of(model)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(home, state, memory="64MiB", signals=False, quiet=True) as ckpt:
        start = ckpt.restore() or 0
        assert start == link * STEPS
        curve = train(name, model, optimizer, range(start, start + STEPS))
        ckpt.save(start + STEPS)
        ckpt.wait()
    return curve


def follow(worlds: Worlds, name: str, home: Path, chain: list[tuple[int, dict[str, Any]]]) -> None:
    expected = whole_curve(name, STEPS * len(chain))
    for link, (size, knobs) in enumerate(chain):
        for curve in worlds(size).run(go_on, name, home, link, knobs):
            assert len(curve) == STEPS
            for found, true in zip(curve, expected[link * STEPS :], strict=False):
                assert found == pytest.approx(true, rel=1e-4), f"link {link}: {size} ranks with {knobs}"


def test_a_gpt_goes_on_under_other_knobs_and_ranks(worlds: Worlds, tmp_path: Path) -> None:
    follow(worlds, "gpt", tmp_path / "home", CHAIN[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "conv", "t5"])
def test_every_model_goes_on_through_the_whole_chain(worlds: Worlds, tmp_path: Path, name: str) -> None:
    follow(worlds, name, tmp_path / "home", CHAIN)
