"""Initial weights: from meta, different on each rank, or invalid; the description of a sharded model."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import holdfast
from elastic.conftest import Worlds
from nursery import shared
from stage.training import make_checkpointer
from train.sharding.models import Gpt, batch, make
from train.sharding.parity import STEPS, Curve, optimizer_of, train, whole_curve

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
    assert worlds(2).run(fails_while_sending, holdfast.Corrupt) == [("Corrupt", "a chunk is damaged")] * 2


@pytest.mark.fsdp2_on_cpu
def test_an_error_of_the_given_weights_themselves_raises_on_every_rank(worlds: Worlds) -> None:
    mine, other = ("OSError", "a chunk is damaged"), ("HoldfastError", "OSError: a chunk is damaged")
    assert worlds(2).run(fails_while_sending, OSError) == [mine, other]


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


OPTIONS = ("activation_checkpointing", "cpu_offload")
GPT = """\
Gpt sharded over 2 ranks (ZeRO-3), on cpu over gloo
  13,887 parameters, 55.5 kB; this rank holds 28.6 kB (51.4%) and gathers up to 19.5 kB more
  computes in bfloat16, averages gradients in float32
  offloaded to host memory, recomputed in backward
  unit of the whole model: 1,449 parameters, 2.9 kB of 5.8 kB here, kept after forward
  3 units, layers.0 to layers.2: each 4,146 parameters, 8.5 kB of 16.6 kB here, freed after forward
  note: the parameters are in host memory anyway: cpu_offload has no effect
  note: 1 buffer in another dtype (place): convert before adding to activations"""

CONV = """\
ConvNet replicated on 2 ranks (DDP), on cpu over gloo
  23,805 parameters, 95.2 kB; this rank holds 95.2 kB (100.0%) and gathers up to 95.2 kB more
  unit of the whole model: 1,020 parameters, 4.1 kB of 4.1 kB here, kept after forward
  unit conv2: 1,095 parameters, 4.4 kB of 4.4 kB here, freed after forward
  unit fc1: 21,690 parameters, 86.8 kB of 86.8 kB here, freed after forward"""


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize(
    ("name", "options", "described", "blocks"),
    [
        ("gpt", dict.fromkeys(OPTIONS, True) | {"dtype": "bf16"}, GPT, "repeated layers: Layer"),
        ("conv", {"wrap": 1000, "shards": 1}, CONV, "modules of at least 1,000 parameters"),
    ],
)
def test_the_description_is_the_same_while_parameters_are_gathered(
    worlds: Worlds, name: str, options: dict[str, Any], described: str, blocks: str
) -> None:
    (printed, after, between), (nothing, *_) = worlds(2).run(printed_by_shard, name, options)
    assert after == between == described
    assert printed == f"holdfast: {described}\n  blocks: {blocks}\n"
    assert nothing == ""  # only rank 0 prints


@pytest.mark.fsdp2_on_cpu
def test_a_model_sharded_by_hand_has_the_same_description_and_batch_norms_are_noted(worlds: Worlds) -> None:
    for ours, theirs, notes in worlds(2).run(by_hand):
        assert ours == theirs
        assert "3 units, layers.0 to layers.2: each" in ours
        assert notes == ("1 batch norm with statistics of each rank's own batch only",)


def test_models_that_are_not_sharded_by_fsdp2_are_noted(worlds: Worlds) -> None:
    ((alone,), (ddp,), (partly,)) = worlds(2).run(of_others)[0]
    assert "not sharded" in alone
    assert ddp == "DDP: each of 2 ranks has a full copy"
    assert partly == "27 parameters outside of all units: each rank trains its own, without synchronization"


def test_tied_parameters_of_a_plain_model_count_once() -> None:
    assert str(holdfast.describe(make("t5"))) == (
        "T5ForConditionalGeneration: 14,955 parameters, 59.8 kB\n"
        "  note: not sharded; call holdfast.shard(model) to shard it"
    )


def from_meta(rank: int, name: str, options: dict[str, Any], source: str, home: Path) -> Curve:
    """Return the curve of a model on meta whose weights come from `source`."""
    whole = make(name)
    if source == "rank 0" and rank == 0:
        model, weights = whole, None
    else:
        with torch.device("meta"):
            model = make(name)
        weights = {"rank 0": None, "mapping": whole.state_dict(), "home": home}[source] if rank == 0 else None
        if source != "rank 0" and name == "gpt":
            model.place = whole.place  # not in the state dict, so the user has to create it
    holdfast.shard(model, **options, weights=weights, quiet=True)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return train(name, model, optimizer_of(model), range(STEPS))


def from_different_ranks(rank: int) -> tuple[Curve, str]:
    """Return the curve of a model with different weights on each rank, and the output."""
    model = make("gpt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        holdfast.shard(model, shards=1)
    return train("gpt", model, optimizer_of(model), range(STEPS)), output.getvalue()


def rejection(rank: int, case: str, folder: Path) -> tuple[str, str, bool]:
    """Return the class of the error, its message, and whether the model is unchanged."""
    model, options = _wrong(rank, case, folder)
    before = [type(module) for module in model.modules()]
    kind, message = _error_of(model, **options)
    return kind, message, before == [type(module) for module in model.modules()]


def _error_of(model: Any, **options: Any) -> tuple[str, str]:
    try:
        holdfast.shard(model, **options, quiet=True)
    except (holdfast.HoldfastError, OSError) as error:
        dist.barrier()  # every rank has raised, and none is left in a collective
        return type(error).__name__, str(error)
    return "", ""


def _wrong(rank: int, case: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    with torch.device("meta"):
        blank = make("gpt")
    mixed: Any = make("gpt")
    mixed.layers[1].mlp.to(torch.float64)
    smaller = {name: tensor[:1] for name, tensor in make("gpt").state_dict().items()}
    no_head = {n: t for n, t in make("gpt").state_dict().items() if n not in ("head.weight", "embed.weight")}
    own: dict[str, tuple[Any, dict[str, Any]]] = {
        "uneven": (make("gpt"), {"shards": 3}),
        "meta": (blank, {}),
        "buffer": (blank, {"weights": make("gpt").state_dict()}),
        "missing": (blank, {"weights": no_head}),
        "shape": (blank, {"weights": smaller}),
        "no home": (blank, {"weights": folder / "nowhere"}),
        "other model": (make("conv"), {"weights": folder}),
        "ranks differ": (make("gpt") if rank == 0 else Gpt(width=33), {}),
        "dtypes": (mixed, {}),
        "sharded": (_partly_sharded(), {}),
        "wrapped": (nn.parallel.DistributedDataParallel(make("conv")), {}),
        "no dtype": (make("gpt"), {"dtype": "int8"}),
        "no prefetch": (make("gpt"), {"prefetch": -1}),
        "no device": (make("gpt"), {"device": "xpu"}),
    }
    return own[case]


def _partly_sharded() -> Any:
    model = make("gpt")
    fully_shard(model.layers[1])
    return model


def fails_while_sending(rank: int, kind: type[Exception]) -> tuple[str, str]:
    """Shard with weights that fit, but cannot be read while they are sent."""
    with torch.device("meta"):
        model = make("gpt")
    model.place = make("gpt").place
    return _error_of(model, weights=Damaged(make("gpt").state_dict(), kind))


class Damaged(dict[str, torch.Tensor]):
    """A state dict in which one tensor can be read only once."""

    is_read = False

    def __init__(self, tensors: dict[str, torch.Tensor], kind: type[Exception]) -> None:
        super().__init__(tensors)
        self.kind = kind

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "layers.1.norm.weight":
            if self.is_read:
                raise self.kind("a chunk is damaged")
            self.is_read = True
        return super().__getitem__(name)


def printed_by_shard(rank: int, name: str, options: dict[str, Any]) -> tuple[str, str, str]:
    """Return the output of `shard`, and of `describe` after it and between forward and backward."""
    output = io.StringIO()
    model = make(name)
    with contextlib.redirect_stderr(output):
        holdfast.shard(model, **options)
    after = str(holdfast.describe(model))
    model(*batch(name, 0))
    return output.getvalue(), after, str(holdfast.describe(model))


def by_hand(rank: int) -> tuple[str, str, tuple[str, ...]]:
    """Return the descriptions of a model sharded by `shard` and by hand, and the notes on a batch norm."""
    ours, theirs = make("gpt"), make("gpt")
    holdfast.shard(ours, quiet=True)
    for layer in theirs.layers:
        fully_shard(layer)
    fully_shard(theirs)
    norm = holdfast.shard(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), quiet=True)
    return str(holdfast.describe(ours)), str(holdfast.describe(theirs)), holdfast.describe(norm).notes


def of_others(rank: int) -> list[tuple[str, ...]]:
    """Return the notes on models that are not fully sharded by FSDP2."""
    models = [make("gpt"), nn.parallel.DistributedDataParallel(make("conv")), _partly_sharded()]
    return [holdfast.describe(model).notes for model in models]


def generated(rank: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a sharded and an unsharded T5. `generate` does not call the model directly."""
    whole, model = make("t5"), holdfast.shard(make("t5"), quiet=True)
    register_fsdp_forward_method(model, "generate")
    tokens = batch("t5", 0)[0][:2]
    with torch.no_grad():
        texts = [each.generate(tokens, max_new_tokens=5, do_sample=False) for each in (model, whole)]
        return texts[0].flatten().tolist(), texts[1].flatten().tolist()
