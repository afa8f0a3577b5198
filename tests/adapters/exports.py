"""Comparison of exports, as stock readers load them, with the live state of a training."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import holdfast
from adapters import sharded
from exchange.stock import load_dcp
from holdfast.checkpoint.exchange.exporter import export_checkpoint


def by_name(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Return the state of an optimizer by the names of parameters, with whole tensors."""
    names: dict[Any, str] = {one: f"model.{name}" for name, one in model.named_parameters()}
    rows = optimizer.param_groups
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in rows]
    slots = optimizer.state.items()
    state = {names[one]: {key: whole(value) for key, value in kept.items()} for one, kept in slots}
    return {"state": state, "param_groups": groups}


def whole(value: Any) -> Any:
    """Return a tensor as a whole on every rank."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_exports(home: Path, live: dict[str, Any], folder: Path, *, bookkeeping: Collection[str]) -> None:
    """Export the newest checkpoint in each format, and compare what stock readers find with the live state.

    `live` has the names of a checkpoint; the top-level keys in `bookkeeping` only Holdfast needs.
    """
    checkpoint, kept = holdfast.open(home), dict(sharded.flat(live))
    for kind in ("torch", "dcp", "safetensors"):
        export_checkpoint(checkpoint, folder / kind, kind=kind)
    dcp_to_torch_save(folder / "dcp", folder / "stock.pt")
    for name in ("torch", "stock.pt"):
        found = torch.load(folder / name, weights_only=True)
        assert found.keys() == live.keys() | set(bookkeeping)
        assert dict(sharded.flat({key: found[key] for key in live})) == kept, name
    target = emptied(live)
    load_dcp(target, folder / "dcp")  # fails at a missing key
    assert dict(sharded.flat(target)) == kept
    tensors = {path: value for path, value in kept.items() if is_tensor(value)}
    found = {f".{name}": value for name, value in load_file(folder / "safetensors").items()}
    found = {path: value for path, value in found.items() if path.split(".")[1] not in bookkeeping}
    assert {path: dict(sharded.flat(value))[""] for path, value in found.items()} == tensors
    assert len(tensors) > 2


def is_tensor(leaf: Any) -> bool:
    """Return True for a tensor in the form of `sharded.flat`."""
    return isinstance(leaf, tuple) and len(leaf) == 2 and str(leaf[0]).startswith("torch.")


def emptied(value: Any) -> Any:
    """Return a state of the same structure with other numbers."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    return [emptied(one) for one in value] if isinstance(value, list) else None
