"""Where a model begins: on meta, differently on each rank, or with something wrong, which all hear of."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import holdfast
from elastic.conftest import Worlds
from nursery import shared
from train.sharding.models import make
from train.sharding.parity import Curve, whole_curve
from train.sharding.starts import breaks_on_the_way, from_different_ranks, from_meta, generated, refusal

pytestmark = pytest.mark.ranks

_expected = cache(whole_curve)


def is_like(curve: Curve, name: str) -> bool:
    return all(
        found == pytest.approx(true, rel=2e-4) for found, true in zip(curve, _expected(name), strict=True)
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run that has saved a GPT's weights, and optimizer state beside them."""
    model = make("gpt")
    home = tmp_path / "home"
    with holdfast.Checkpointer(home, {"net": model, "step": 1}, signals=False, quiet=True) as ckpt:
        ckpt.save(1)
        ckpt.wait()
    return home


@pytest.mark.parametrize("source", ["rank 0", "mapping", "home"])
@pytest.mark.parametrize("knobs", [{}, {"shards": 1, "offload": True, "recompute": True}], ids=str)
def test_a_model_on_meta_is_filled_and_trains_as_one_process(
    worlds: Worlds, home: Path, source: str, knobs: dict[str, Any]
) -> None:
    """Its head stays tied, its odd shapes are cut unevenly, its buffer comes along from rank 0."""
    for curve in worlds(2).run(from_meta, "gpt", knobs, source, home):
        assert is_like(curve, "gpt")


@pytest.mark.parametrize("source", ["rank 0", "mapping"])
def test_a_tied_t5_on_meta_trains_as_one_process(worlds: Worlds, tmp_path: Path, source: str) -> None:
    for curve in worlds(2).run(from_meta, "t5", {"keep": True}, source, tmp_path):
        assert is_like(curve, "t5")


def test_four_ranks_in_two_copies_are_filled_alike(worlds: Worlds, home: Path) -> None:
    for curve in worlds(4).run(from_meta, "gpt", {"shards": 2}, "home", home):
        assert is_like(curve, "gpt")


def test_ranks_that_drew_different_weights_get_those_of_rank_0_and_are_told(worlds: Worlds) -> None:
    """FSDP would train a patchwork of them, or copies that differ."""
    (curve, said), (other, nothing) = worlds(2).run(from_different_ranks)
    assert is_like(curve, "gpt")
    assert is_like(other, "gpt")
    assert "filled with rank 0's weights, since the ranks' differed" in said
    assert nothing == ""


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("uneven", "InvalidInput", "shards=3 ranks cannot share .* may be 1, 2, or 'all'"),
        ("meta", "InvalidInput", "on meta .*embed.weight.* no weights were named"),
        ("buffer", "InvalidInput", "1 buffers are on meta and not in weights=, place"),
        ("missing", "InvalidInput", "nothing for 1 of .* parameters, embed.weight"),
        ("shape", "InvalidInput", "embed.weight of shape .* but the model's is"),
        ("no home", "NotFound", "nowhere"),
        ("other model", "NotFound", "no weights for this model"),
        ("ranks differ", "InvalidInput", "model of rank 1 is not that of rank 0"),
        ("dtypes", "InvalidInput", r"one dtype, but in layers.1 .*float64"),
        ("sharded", "Unsupported", "layers.1 is sharded or wrapped already"),
        ("wrapped", "Unsupported", "DistributedDataParallel"),
        ("no dtype", "InvalidInput", "got 'int8'"),
        ("no prefetch", "InvalidInput", "got -1"),
        ("no device", "InvalidInput", "machine has"),
    ],
)
def test_what_is_wrong_is_told_on_every_rank_and_nothing_is_changed(
    worlds: Worlds, home: Path, case: str, kind: str, said: str
) -> None:
    for found, message, is_unchanged in worlds(2).run(refusal, case, home):
        assert found == kind
        assert re.search(said, message), message
        assert is_unchanged


def test_weights_that_break_while_they_are_sent_raise_on_every_rank(worlds: Worlds) -> None:
    assert worlds(2).run(breaks_on_the_way) == [("Corrupt", "a chunk is damaged")] * 2


def test_a_sharded_t5_generates_what_a_whole_one_does(worlds: Worlds) -> None:
    for found, expected in worlds(2).run(generated):
        assert found == expected


ALONE = """
import torch, holdfast
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(holdfast.shard(net, dtype="bf16").parameters(), lr=0.1)
net(torch.ones(2, 3)).sum().backward()
optimizer.step()
print(holdfast.describe(net).layout)
"""


def run_alone(**env: str) -> subprocess.CompletedProcess[str]:
    return shared().run(["-c", ALONE], env={**os.environ, **env})


def test_a_single_process_needs_no_process_group() -> None:
    done = run_alone()
    assert done.returncode == 0, done.stderr
    assert "Layout(num_ranks=1, shards=1)" in done.stdout
    assert "on 1 rank, which holds all of it" in done.stderr
    assert "note: there is one rank: nothing is shared or sent" in done.stderr


def test_ranks_without_a_process_group_are_told_how_to_start_one() -> None:
    done = run_alone(WORLD_SIZE="2", RANK="0")
    assert done.returncode != 0
    assert "Call torch.distributed.init_process_group() before holdfast.shard()" in done.stderr
