"""A run resumes with other options and another number of ranks, and its loss curve is continuous."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from elastic.conftest import Worlds
from train.sharding.models import make
from train.sharding.parity import Curve, optimizer_of, train, whole_curve

pytestmark = [pytest.mark.ranks, pytest.mark.fsdp2_on_cpu]

STEPS = 2
CHAIN: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (1, {"reshard_after_forward": False}),
    (4, {"shards": 2, "activation_checkpointing": True}),
    (2, {"shards": 1, "cpu_offload": True}),
    (4, {"wrap": [], "prefetch": 1}),
    (2, {"wrap": 500, "activation_checkpointing": True, "reshard_after_forward": False}),
]


def resume(rank: int, name: str, home: Path, link: int, options: dict[str, Any]) -> Curve:
    """Restore the checkpoint of the previous link, train, and save."""
    model = holdfast.shard(make(name), **options, quiet=True)
    optimizer = optimizer_of(model)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(
        home, state, memory="64MiB", quiet=True, watches=[holdfast.Preemption(signals=False)]
    ) as ckpt:
        start = ckpt.restore() or 0
        assert start == link * STEPS
        curve = train(name, model, optimizer, range(start, start + STEPS))
        ckpt.save(start + STEPS)
        ckpt.wait()
    return curve


def follow(worlds: Worlds, name: str, home: Path, chain: list[tuple[int, dict[str, Any]]]) -> None:
    expected = whole_curve(name, STEPS * len(chain))
    for link, (size, options) in enumerate(chain):
        for curve in worlds(size).run(resume, name, home, link, options):
            assert len(curve) == STEPS
            for found, true in zip(curve, expected[link * STEPS :], strict=False):
                assert found == pytest.approx(true, rel=1e-4), f"link {link}: {size} ranks with {options}"


@pytest.mark.essential
def test_a_gpt_resumes_with_other_options_and_ranks(worlds: Worlds, tmp_path: Path) -> None:
    follow(worlds, "gpt", tmp_path / "home", CHAIN[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "conv", "t5"])
def test_every_model_resumes_through_the_whole_chain(worlds: Worlds, tmp_path: Path, name: str) -> None:
    follow(worlds, name, tmp_path / "home", CHAIN)
