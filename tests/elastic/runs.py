"""A training run in a layout: its objects, how to train them, and all of its state to compare with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import holdfast
from layouts import LAYOUTS, Trained, gather, same, whole

BY_SIZE: dict[int, tuple[str, ...]] = {
    1: ("alone",),
    2: ("ddp", "fsdp", "offload", "meta", "partly", "tp", "pipeline"),
    3: ("ddp", "fsdp", "unresharded", "partly"),
    4: (
        *("ddp", "fsdp", "unresharded", "offload", "meta", "hsdp", "partly"),
        *("tp", "tp-pairs", "fsdp-tp", "pipeline", "pipeline-fsdp"),
    ),
}
"""The layouts of each number of ranks. Those of FSDP1, without DTensors, are tried with states alone."""


class Run(Trained):
    """A training run in a layout: its objects, and how to train them."""

    def __init__(self, layout: str, *, seed: int, is_reversed: bool = False) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed)
        self.model: Any = LAYOUTS[layout]()
        bare: Any = self.model.module if layout == "ddp" else self.model
        _add_buffers(bare)
        weights = [p for p in bare.parameters() if p.dim() > 1]
        others = [p for p in bare.parameters() if p.dim() <= 1]
        groups: list[Any] = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.5}]
        # Not foreach: it does not take plain tensors and DTensors, or DTensors of several meshes, together.
        self.optimizer = torch.optim.AdamW(groups[::-1] if is_reversed else groups, lr=0.01, foreach=False)
        self.table = torch.randn(5, 3).bfloat16()
        self.own = torch.randn(2) + rank
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "table": holdfast.replicated(self.table),
            "own": holdfast.per_rank(self.own),
            "epoch": seed,
        }

    def full(self) -> dict[str, Any]:
        """Every tensor whole, gathered by DTensor's own collectives and from all ranks, by its own name.

        Ranks: collective; all ranks get the same.
        """
        here: dict[str, torch.Tensor] = {"table": self.table.clone()}
        self.model.state_dict()  # lets FSDP put its shards back
        for name, parameter in self.model.named_parameters():
            name = name.removeprefix("module.")
            here[name] = whole(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                here[f"{name}.{key}"] = whole(value)
        here |= {name.removeprefix("module."): one.clone() for name, one in self.model.named_buffers()}
        every: dict[str, torch.Tensor] = {}
        for tensors in gather(here):
            for name, tensor in tensors.items():
                assert same(every.setdefault(name, tensor), tensor), f"the ranks differ in {name}"
        facts = {"epoch": self.state["epoch"], "own": gather(self.own.clone())}
        return {"tensors": every, **facts}


def _add_buffers(model: Any) -> None:
    """Both to a whole model, one to each stage of a pipeline."""
    stage = getattr(model, "stage", None)
    if stage in (None, 0):
        model.register_buffer("scale", torch.full((5,), 2.0))
    if stage in (None, 1):
        model.register_buffer("count", torch.tensor(3))
