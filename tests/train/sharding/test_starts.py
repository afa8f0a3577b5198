"""Initial weights: from meta, different on each rank, or invalid, which raises on all ranks."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from elastic.conftest import Worlds
from nursery import shared
from stage.training import make_checkpointer
from train.sharding.models import make
from train.sharding.parity import Curve, whole_curve
from train.sharding.starts import fails_while_sending, from_different_ranks, from_meta, generated, rejection

pytestmark = pytest.mark.ranks
on_cpu = functools.partial(pytest.param, marks=pytest.mark.fsdp2_on_cpu)

_expected = cache(whole_curve)


def is_like(curve: Curve, name: str) -> bool:
    pairs = zip(curve, _expected(name), strict=True)
    return all(found == pytest.approx(true, rel=2e-4) for found, true in pairs)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a run with a checkpoint of a GPT."""
    model = make("gpt")
    home = tmp_path / "home"
    with make_checkpointer(home, {"net": model, "step": 1}) as ckpt:
        ckpt.save(1)
        ckpt.wait()
    return home


MANY = {"shards": 1, "cpu_offload": True, "activation_checkpointing": True}


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize(
    ("ranks", "name", "options", "source"),
    [
        *((2, "gpt", options, source) for options in ({}, MANY) for source in ("rank 0", "mapping", "home")),
        *((2, "t5", {"reshard_after_forward": False}, source) for source in ("rank 0", "mapping")),
        (4, "gpt", {"shards": 2}, "home"),
    ],
    ids=str,
)
def test_a_model_on_meta_receives_its_weights_and_trains_as_one_process(
    worlds: Worlds, home: Path, ranks: int, name: str, options: dict[str, Any], source: str
) -> None:
    """Its head stays tied, its odd shapes are sharded unevenly, and rank 0 sends its buffer."""
    for curve in worlds(ranks).run(from_meta, name, options, source, home):
        assert is_like(curve, name)


@pytest.mark.fsdp2_on_cpu
def test_ranks_with_different_weights_receive_those_of_rank_0_with_a_message(worlds: Worlds) -> None:
    """FSDP alone would train a mix of them, or different copies."""
    (curve, printed), (other, nothing) = worlds(2).run(from_different_ranks)
    assert is_like(curve, "gpt")
    assert is_like(other, "gpt")
    assert "loaded rank 0's weights, because the ranks' differed" in printed
    assert nothing == ""


@pytest.mark.parametrize(
    ("case", "kind", "pattern"),
    [
        on_cpu("uneven", "InvalidInput", "shards=3 does not divide 2 ranks evenly.* may be 1, 2, or 'all'"),
        on_cpu("meta", "InvalidInput", "on meta .*embed.weight.* weights= is missing"),
        on_cpu("buffer", "InvalidInput", "1 buffer on meta would stay without values: weights= lacks place"),
        on_cpu("missing", "InvalidInput", "weights= lacks 1 of .* parameters, such as embed.weight"),
        on_cpu("shape", "InvalidInput", "embed.weight of shape .* but the model's shape is"),
        on_cpu("no home", "NotFound", "nowhere"),
        on_cpu("other model", "NotFound", "no weights for this model"),
        on_cpu("ranks differ", "InvalidInput", "model of rank 1 differs from rank 0's"),
        on_cpu("dtypes", "InvalidInput", r"one dtype, but in layers.1 .*float64"),
        ("sharded", "Unsupported", "layers.1 is already sharded or wrapped"),
        ("wrapped", "Unsupported", "DistributedDataParallel"),
        ("no dtype", "InvalidInput", "got 'int8'"),
        ("no prefetch", "InvalidInput", "got -1"),
        ("no device", "InvalidInput", "machine has"),
    ],
)
def test_invalid_arguments_raise_on_every_rank_and_change_nothing(
    worlds: Worlds, home: Path, case: str, kind: str, pattern: str
) -> None:
    for found, message, is_unchanged in worlds(2).run(rejection, case, home):
        assert found == kind
        assert re.search(pattern, message), message
        assert is_unchanged


@pytest.mark.fsdp2_on_cpu
def test_weights_that_cannot_be_read_while_they_are_sent_raise_on_every_rank(worlds: Worlds) -> None:
    assert worlds(2).run(fails_while_sending) == [("Corrupt", "a chunk is damaged")] * 2


@pytest.mark.fsdp2_on_cpu
def test_a_sharded_t5_generates_the_same_tokens(worlds: Worlds) -> None:
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


@pytest.mark.fsdp2_on_cpu
def test_a_single_process_needs_no_process_group() -> None:
    done = run_alone()
    assert done.returncode == 0, done.stderr
    assert "Layout(num_ranks=1, shards=1)" in done.stdout
    assert "on 1 rank, not sharded" in done.stderr
    assert "note: with one rank, nothing is sharded or communicated" in done.stderr


def test_without_a_process_group_the_error_names_the_call_to_make() -> None:
    done = run_alone(WORLD_SIZE="2", RANK="0")
    assert done.returncode != 0
    assert "Call torch.distributed.init_process_group() before holdfast.shard()" in done.stderr
