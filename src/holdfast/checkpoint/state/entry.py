"""Entries of a state: their interface, the objects that are one, and what their state_dict() leaves out."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.state.replication import MarkedObject, Replication

if TYPE_CHECKING:  # these modules look for entries in values, so they import this one
    from holdfast.checkpoint.state.capture import TensorCollector
    from holdfast.checkpoint.state.load import LoadPlan
    from holdfast.checkpoint.state.tensor_table import Role


class StateEntry(ABC):
    """An object under a top-level key. Implementations are final.

    Args:
        replication: how ranks hold its tensors, if the user has marked it.
    """

    def __init__(self, key: str, value: Any, replication: Replication | None = None) -> None:
        self.key = key
        self.value = value
        self.replication = replication

    @abstractmethod
    def capture(self, collector: TensorCollector) -> Any:
        """Collect all tensors, and return the entry's encoded values."""

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor, Role]]:
        """Return name, live tensor and role of tensors that are found without user code."""
        return ()

    @abstractmethod
    def plan(self, plan: LoadPlan, put: Callable[[Any], None]) -> None:
        """Plan how the entry is filled from the checkpoint. Changes nothing live.

        Args:
            plan: the plan to extend.
            put: stores a new object under the entry's key, for objects that cannot be changed in place.
        """


_SIMPLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.nn.Parameter}
)
"""Types that are neither entries nor containers."""


def is_stateful(value: Any) -> bool:
    """Return True if an object has state_dict() and load_state_dict()."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_follower(value: Any) -> bool:
    """Return True if an object counts completed steps, such as the position in the data."""
    return callable(getattr(value, "complete_steps", None)) and not isinstance(value, type)


def is_generator(value: Any) -> bool:
    """Return True for a torch, python or numpy random number generator."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def is_entry(value: Any) -> bool:
    """Return True for an object that is always saved under its own key.

    These are modules, optimizers, other objects with state_dict() and load_state_dict(), random number
    generators, and whatever the user has marked.
    """
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, (type, torch.Tensor)):
        return False
    return kind is MarkedObject or is_stateful(value) or is_generator(value)


def nested_entries(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the key path and object of each entry in a container, at any depth.

    Args:
        path: key path of the container.
    """
    kind = kind_of(value)
    if kind is None or _is_plain(value):
        return
    for step, item in kind.items(value):
        if is_entry(item):
            yield f"{path}.{step}", item
        else:
            yield from nested_entries(item, f"{path}.{step}")


def holds_entry(value: Any) -> bool:
    """Return True if a value is an entry or a container of one."""
    return is_entry(value) or next(nested_entries(value, ""), None) is not None


def has_only_entries(value: Any) -> bool:
    """Return True for a container of entries, or of such containers, without other values."""
    kind = kind_of(value)
    items = [] if kind is None else [item for _, item in kind.items(value)]
    return bool(items) and all(is_entry(item) or has_only_entries(item) for item in items)


def _is_plain(value: Any) -> bool:
    """Return True if a value certainly holds no entries. Quick, since every save looks at all containers."""
    kind = type(value)
    if kind in _SIMPLE:
        return True
    items = value.values() if kind is dict else value if kind is list or kind is tuple else None
    return items is not None and (_SIMPLE.issuperset(map(type, items)) or all(map(_is_plain, items)))


class Skippable(Protocol):
    """Data that can leave ranges of samples out of their order, such as a sampler. Recognized by its members.

    Its `state_dict` and `load_state_dict` include all of these.
    """

    @property
    def position(self) -> int:
        """Samples consumed by completed optimizer steps since the beginning of the run, on all ranks."""
        ...

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """Ranges that are left out, each as its first sample and its end."""
        ...

    def skip(self, start: int, stop: int) -> None:
        """Leave samples out of the order for ever, on this rank and all others.

        If the position is one of them, it moves to `stop`. A live iterator continues there.

        Args:
            start: first position that is left out.
            stop: position after the last one.
        """
        ...


def is_skippable(value: Any) -> bool:
    """Return True if an object has the members of `Skippable`."""
    if isinstance(value, (type, torch.nn.Module, torch.Tensor)):
        return False
    return (
        callable(getattr(value, "skip", None))
        and type(getattr(value, "position", None)) is int
        and isinstance(getattr(value, "skipped", None), tuple)
    )


def is_stream(value: Any) -> bool:
    """Return True for an object with a state that is iterated: a data loader, a sampler, a data set."""
    if isinstance(value, (type, torch.nn.Module, torch.Tensor, torch.optim.Optimizer, Mapping)):
        return False
    return hasattr(type(value), "__iter__") and not hasattr(type(value), "keys")


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
        for path, metric in module.named_modules():
            if isinstance(metric, package.Metric) and hasattr(metric, "_update_count"):
                yield path, metric


def _is_wrapper(value: Any) -> bool:
    return any(
        one.__name__ in _WRAPPERS and one.__module__.partition(".")[0] == "schedulefree"
        for one in type(value).__mro__
    )
