"""Functions for the ranks in tests of shard: models on meta, differing ranks, invalid arguments, output."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import holdfast
from train.sharding.models import Gpt, batch, make
from train.sharding.parity import STEPS, Curve, optimizer_of, train


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
    except holdfast.HoldfastError as error:
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


def fails_while_sending(rank: int) -> tuple[str, str]:
    """Shard with weights that fit, but cannot be read while they are sent."""
    with torch.device("meta"):
        model = make("gpt")
    model.place = make("gpt").place
    return _error_of(model, weights=Damaged(make("gpt").state_dict()))


class Damaged(dict[str, torch.Tensor]):
    """A state dict in which one tensor can be read only once."""

    is_read = False

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "layers.1.norm.weight":
            if self.is_read:
                raise holdfast.Corrupt("a chunk is damaged")
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
