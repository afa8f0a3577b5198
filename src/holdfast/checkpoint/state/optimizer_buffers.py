"""Composite tensors in the state of optimizers, which make them at their first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.format.composites import SavedTensor, shown_type
from holdfast.checkpoint.state.composite_load import difference, fill_composite, read_composite
from holdfast.checkpoint.state.load import LoadPlan
from holdfast.errors import InvalidInput


def plan_state(
    plan: LoadPlan, optimizer: Optimizer, parameter: torch.Tensor, saved: SavedTensor, live: Any, label: str
) -> Callable[[], torch.Tensor]:
    """Plan to fill one composite tensor of a parameter's state.

    It is the live one, if there is one that fits, or one that the optimizer makes as at its first step.

    Returns:
        A function that returns it after all targets are filled.

    Raises:
        InvalidInput: the live one does not fit, or the optimizer does not make one that does.
    """
    known = [live] if isinstance(live, torch.Tensor) else []
    if not any(difference(plan, saved, one) is None for one in known):
        read = read_composite(plan, saved, plan.device_of(parameter))
        if read is not None:
            return read
        known += _new_states(optimizer, parameter)
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


def _new_states(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return new state tensors of a parameter, as low-bit optimizers make them: signed and unsigned.

    Source: `_new_buffer` of the optimizers in torchao, which they call at their first step.
    """
    make: Callable[[torch.Tensor, bool], torch.Tensor] | None = getattr(optimizer, "_new_buffer", None)
    if make is None or parameter.is_meta:
        return []
    return [make(parameter, is_signed) for is_signed in (True, False)]
