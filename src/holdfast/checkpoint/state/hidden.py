"""State that objects of other libraries keep, and leave out of their state_dict()."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

HIDDEN = "@hidden"
"""Key of this state beside the items of a state_dict()."""
_WRAPPERS = frozenset({"ScheduleFreeWrapper", "ScheduleFreeWrapperReference"})


def hidden_state(value: Any) -> dict[str, Any]:
    """Return plain values by the path of an attribute; empty for most objects.

    The wrappers of schedulefree move parameters between two places, and `train_mode` is the present one. A
    metric of torchmetrics counts its updates, by which its mean states are weighted.
    """
    if isinstance(value, torch.nn.Module):
        return {f"{path}._update_count": int(metric._update_count) for path, metric in _metrics(value)}
    return {"train_mode": bool(value.train_mode)} if _is_wrapper(value) else {}


def set_hidden_state(value: Any, saved: Mapping[str, Any]) -> None:
    """Set what `hidden_state` has returned. Attributes that a live object does not have are left out."""
    if isinstance(value, torch.nn.Module):
        for path, metric in _metrics(value):
            if (count := saved.get(f"{path}._update_count")) is not None:
                metric._update_count = count
                metric._computed = None  # a result of the state before
    elif _is_wrapper(value) and "train_mode" in saved:
        value.train_mode = saved["train_mode"]


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    package: Any = sys.modules.get("torchmetrics")
    if package is not None:
        for path, one in module.named_modules():
            if isinstance(one, package.Metric) and hasattr(one, "_update_count"):
                yield path, one


def _is_wrapper(value: Any) -> bool:
    return any(
        one.__name__ in _WRAPPERS and one.__module__.partition(".")[0] == "schedulefree"
        for one in type(value).__mro__
    )
