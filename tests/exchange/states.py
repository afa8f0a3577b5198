"""States for the tests of exchange: every dtype, no elements, no dimensions, tied, strided."""

from __future__ import annotations

import collections
from typing import Any

import torch

from state.trip import same

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("uint16", "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2"),
)


def tensor_of(name: str, *shape: int) -> torch.Tensor:
    """Return a tensor of a dtype with random bits; booleans are 0 or 1."""
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if name == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def model() -> dict[str, torch.Tensor]:
    """Return a module's state dict with two names for one tensor."""
    found = {f"layer.{name}": tensor_of(name, 3, 5) for name in DTYPES}
    found["scale"] = torch.tensor(2.5)
    found["none"] = torch.zeros(0, 7)
    found["one"] = torch.ones(1, 1, 1)
    found["strided"] = torch.randn(6, 4).t()
    found["slice"] = torch.randn(10, 10)[2:5, ::3]
    found["head"] = found["layer.float32"]
    return found


def training() -> dict[str, Any]:
    """Return everything that a training loop would save with torch.save."""
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 5)}, 1: {"step": torch.tensor(3.0)}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1], "foreach": None}]
    return {
        "model": model(),
        "optimizer": {"state": moments, "param_groups": groups},
        "scheduler": collections.OrderedDict(last_epoch=3, base=[1, 2.5, "x", None]),
        "epoch": 7,
        "best": None,
        "ema": torch.randn(4),
        "mixed": [torch.ones(2), {"deep": torch.zeros(1), "n": 1}],
    }


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that two dicts have the same tensors in any order, and name those that differ."""
    assert set(found) == set(expected)
    assert [name for name in expected if not same(found[name], expected[name])] == []
