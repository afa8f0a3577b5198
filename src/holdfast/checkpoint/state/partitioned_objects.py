"""Objects of DeepSpeed, and those that it has taken over: a Checkpointer would save only a part of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from holdfast.errors import Unsupported

_PACKAGE = "deepspeed."
_CLASSES = {"DeepSpeedEngine": "an engine", "DeepSpeedOptimizer": "an optimizer"}
_WRAPPERS = "deepspeed.runtime.base_optimizer"
_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attributes of DeepSpeed's optimizers with the parameters that they overwrite in each step."""


def check_not_partitioned(key: str, value: Any) -> None:
    """Check that DeepSpeed does not keep a part of an object elsewhere."""
    if (reason := _reason(value)) is not None:
        raise Unsupported(
            f"{key} is {reason}. Nothing was written or loaded. Call attach(engine, home) of "
            "holdfast.adapters.deepspeed, and then engine.save_checkpoint() and engine.load_checkpoint(): "
            "they save and load all of it through Holdfast.",
            key=key,
        )


def may_be_partitioned(value: Any) -> bool:
    """Return True if DeepSpeed may have taken over an object since it was checked; cheap."""
    if _WRAPPERS not in sys.modules:
        return False
    if isinstance(value, torch.nn.Module):
        return _mark(value) is not None
    return isinstance(value, torch.optim.Optimizer) and not _trains_parameters(value)


def _reason(value: Any) -> str | None:
    for base in type(value).__mro__:
        if base.__module__.startswith(_PACKAGE) and base.__name__ in _CLASSES:
            return (
                f"{_CLASSES[base.__name__]} of DeepSpeed, which keeps its state in partitions of each rank; "
                "a Checkpointer would save only a part of it"
            )
    if _WRAPPERS not in sys.modules:
        return None
    if isinstance(value, torch.nn.Module):
        mark = _mark(value)
        if mark == "ds_id":
            return "a module under ZeRO 3, whose parameters are in partitions of each rank"
        if mark is not None or _is_overwritten(value):
            return (
                "a module whose weights an engine of DeepSpeed overwrites in each step from copies of its "
                "own; what a Checkpointer loads into the module would be lost"
            )
    if isinstance(value, torch.optim.Optimizer) and _is_wrapped(value):
        return (
            "an optimizer that was given to DeepSpeed, which has replaced its parameters by partitions or "
            "copies of its own; a Checkpointer would save the optimizer's state without them"
        )
    return None


def _mark(module: torch.nn.Module) -> str | None:
    """Return the name that ZeRO has given to a parameter of a module: of stage 3, else of 1 and 2."""
    parameters = list(module.parameters())
    marks = (name for name in ("ds_id", "_hp_mapping") if any(hasattr(one, name) for one in parameters))
    return next(marks, None)


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer of DeepSpeed uses this one."""
    if _trains_parameters(optimizer):
        return False  # DeepSpeed replaces all parameters by tensors of another class
    # The search does not find what `gc.freeze` has put aside.
    return gc.get_freeze_count() > 0 or any(vars(one).get("optimizer") is optimizer for one in _wrappers())


def _trains_parameters(optimizer: torch.optim.Optimizer) -> bool:
    groups: Iterable[dict[str, Any]] = getattr(optimizer, "param_groups", ())
    return any(isinstance(one, torch.nn.Parameter) for group in groups for one in group["params"])


def _is_overwritten(module: torch.nn.Module) -> bool:
    own = set(map(id, module.parameters()))
    groups = (vars(wrapper).get(name, ()) for wrapper in _wrappers() for name in _GROUPS)
    return any(id(one) in own for one in chain.from_iterable(chain.from_iterable(groups)))


def _wrappers() -> Iterator[Any]:
    """Yield all optimizers of DeepSpeed in this process; they have taken over those of torch."""
    kind: type = sys.modules[_WRAPPERS].DeepSpeedOptimizer
    for wrapper in gc.get_referrers(*_subclasses(kind)):
        if issubclass(type(wrapper), kind):
            yield wrapper


def _subclasses(kind: type) -> list[type]:
    return [kind, *chain.from_iterable(map(_subclasses, type.__subclasses__(kind)))]
