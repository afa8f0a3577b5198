"""Restore of composite tensors: live inner tensors are filled in place, or an optimizer makes new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.format.composites import SavedTensor, shown_type
from holdfast.checkpoint.state.composites import put_together, set_content, take_apart
from holdfast.checkpoint.state.fitting import misfit, needs_live
from holdfast.checkpoint.state.load import Load, LoadPhase, Maker
from holdfast.checkpoint.state.tensors import is_composite, is_sparse, unfillable
from holdfast.checkpoint.state.tree import insert_tensors
from holdfast.errors import InvalidInput


def difference(plan: Load, saved: SavedTensor, live: torch.Tensor) -> str | None:
    """Return how a saved composite tensor and the live one differ, or None."""
    why = misfit(saved, live)
    if why is not None:
        return why
    for name, item in take_apart(live).inner.items():
        part = saved.inner[name]
        if isinstance(part, SavedTensor):
            if not is_sparse(live) and (why := difference(plan, part, item)) is not None:
                return f"{name}: {why}"
            continue
        there, here = (plan.dtype(part.name), plan.shape(part.name)), (item.dtype, tuple(item.shape))
        is_free = is_sparse(live) and (name != "values" or there[0] is here[0])  # its content is replaced
        if there != here and not is_free:
            return f"{name} was saved as {there[0]} {list(there[1])}, but is {here[0]} {list(here[1])}"
    return None


def fill_composite(plan: Load, saved: SavedTensor, live: torch.Tensor, label: str) -> None:
    """Plan to fill a live composite tensor from a saved one. It stays the same object."""
    why = difference(plan, saved, live)
    if why is not None:
        raise InvalidInput(
            f"{label} cannot be restored: {why}. A composite tensor is only restored into a live one of the "
            "same class with the same description. Nothing was changed. Build it as it was, or leave it out "
            "with only= or rename=.",
            key=label,
        )
    if live.is_meta:
        why = "it is on the meta device. Call to_empty(device=...) on the module first."
        raise unfillable(live, label, why)
    _fill(plan, saved, live, label)


def read_composite(plan: Load, saved: SavedTensor, device: torch.device) -> Maker | None:
    """Plan to read a composite tensor into new memory; return a function that makes it filled.

    None if its class is the program's.
    """
    if needs_live(saved):
        return None
    plan.read_tree(saved, device)
    return lambda: insert_tensors(saved, lambda name: plan.tensor(name, device))


def _fill(plan: Load, saved: SavedTensor, live: torch.Tensor, label: str) -> None:
    if is_sparse(live):
        _replace_content(plan, saved, live)
        return
    for name, item in take_apart(live).inner.items():
        part = saved.inner[name]
        if isinstance(part, SavedTensor):
            _fill(plan, part, item, f"{label}.{name}")
        else:
            assert not is_composite(item), label
            plan.fill(part.name, item, f"{label}.{name}")


def _replace_content(plan: Load, saved: SavedTensor, live: torch.Tensor) -> None:
    """Plan to replace the content of a sparse tensor, whose number of elements may differ."""
    plan.read_tree(saved, live.device)

    def finish() -> None:
        inner = {name: plan.insert(item) for name, item in saved.inner.items()}
        # A copy: names that were tied when they were saved share one object.
        new = put_together(replace(saved, inner=inner), None)
        set_content(live, new.to(device=live.device, copy=True))

    plan.add_step(LoadPhase.COPY, finish)


def plan_state(
    plan: Load, optimizer: Optimizer, parameter: torch.Tensor, saved: SavedTensor, live: Any, label: str
) -> Maker:
    """Plan to fill one composite tensor of a parameter's state; return a function that returns it filled.

    It is the live one, if there is one that fits, or one that the optimizer makes as at its first step.
    """
    known = [live] if isinstance(live, torch.Tensor) else []
    if not any(difference(plan, saved, one) is None for one in known):
        read = read_composite(plan, saved, plan.device_of(parameter))
        if read is not None:
            return read
        make: Callable[..., torch.Tensor] | None = getattr(optimizer, "_new_buffer", None)
        if make is not None and not parameter.is_meta:  # torchao's low-bit optimizers call it at a first step
            known += [make(parameter, is_signed) for is_signed in (True, False)]
    if not known:
        raise InvalidInput(
            f"{label} was saved as {shown_type(saved.type, saved.facts)}, but the live "
            f"{type(optimizer).__qualname__} has no state yet that shows this class. A checkpoint only names "
            "classes, and never imports them. Nothing was changed. Restore into the same kind of optimizer, "
            "or take one step with it first: the restore replaces all that the step changes.",
            key=label,
        )
    target = next((one for one in known if difference(plan, saved, one) is None), known[0])
    fill_composite(plan, saved, target, label)
    return lambda: target
