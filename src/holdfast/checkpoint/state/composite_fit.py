"""Fit of saved composite tensors to live ones, whose class a checkpoint only names."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.checkpoint.format.composites import DTENSOR, SavedTensor, shown_type
from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.state.composites import Composite, is_composite, take_apart
from holdfast.checkpoint.state.containers import has_name
from holdfast.checkpoint.state.fitted_tensor import FittedTensor
from holdfast.checkpoint.state.tree import facts_of
from holdfast.errors import HoldfastError
from holdfast.system.documents import shown


def fit_composite(saved: Any, live: Any) -> Any:
    """Return a saved tensor with the live one of its class, at every depth.

    Args:
        saved: a `SavedTensor`, or a `TensorRef` inside one.
        live: any value; `misfit` has returned None for it, unless the type needs no live tensor.
    """
    if not isinstance(saved, SavedTensor) or misfit(saved, live) is not None:
        return saved
    found = take_apart(live).inner
    inner = {name: fit_composite(item, found[name]) for name, item in saved.inner.items()}
    return FittedTensor(SavedTensor(saved.type, inner, saved.facts), live)


def needs_live(saved: Any) -> bool:
    """Return True if a composite tensor is only built beside a live one."""
    if not isinstance(saved, SavedTensor):
        return False
    return saved.is_class or saved.type == DTENSOR or any(map(needs_live, saved.inner.values()))


def misfit(saved: SavedTensor, live: Any) -> str | None:
    """Return how a saved composite tensor and a live value differ, or None.

    The number of elements of a sparse tensor may differ, and devices may.
    """
    if not isinstance(live, torch.Tensor):
        return f"it was saved as {shown_type(saved.type, saved.facts)}, but nothing of this type is there"
    if not is_composite(live):
        return f"it was saved as {shown_type(saved.type, saved.facts)}, but is a plain {live.dtype} tensor"
    try:
        found = take_apart(live)
        facts = facts_of(found, "the tensor")
        is_same = _comparable(facts) == _comparable(saved.facts)
    except HoldfastError as error:
        return f"its live tensor cannot be used: {error}"
    if not _has_type(saved, found, live):
        there, here = (shown_type(one.type, one.facts) for one in (saved, found))
        return f"it was saved as {there}, but is {here}"
    if list(found.inner) != list(saved.inner):
        return f"it was saved with the inner tensors {list(saved.inner)}, but has {list(found.inner)}"
    return _inner_misfit(saved, found) if is_same else _changed(saved, facts)


def _changed(saved: SavedTensor, facts: dict[str, Any]) -> str:
    """Return how two descriptions differ."""
    if saved.type != DTENSOR:
        return f"its description was {shown(saved.facts)}, but is {shown(facts)}"
    there, here = ([one[name] for name in ("shape", "offsets", "sizes")] for one in (saved.facts, facts))
    return (
        "a DTensor over a composite tensor cannot be resharded, and shape, offsets and sizes of the saved "
        f"part are {there}, but those of the live one {here}. It is restored on the same number of ranks only"
    )


def _inner_misfit(saved: SavedTensor, found: Composite) -> str | None:
    for name, item in saved.inner.items():
        live = found.inner[name]
        why = None
        if isinstance(item, SavedTensor):
            why = misfit(item, live)
        elif is_composite(live):
            one = take_apart(live)
            why = f"it was saved as a plain tensor, but is {shown_type(one.type, one.facts)}"
        if why is not None:
            return f"{name}: {why}"
    return None


def _has_type(saved: SavedTensor, found: Composite, live: torch.Tensor) -> bool:
    if saved.is_class:
        return found.has_context and has_name(type(live), saved.type)
    return found.type == saved.type


def _comparable(facts: Any) -> Any:
    """Return facts as JSON without what may differ: devices, and whether a sparse tensor is coalesced."""
    return _without_devices(encode({k: v for k, v in facts.items() if k != "coalesced"}, "description"))


def _without_devices(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_devices(item) for item in value]
    if not isinstance(value, dict):
        return value
    body = value.get("$torch")
    if isinstance(body, list) and body[:1] == ["device"]:
        return None
    return {key: _without_devices(item) for key, item in value.items()}
