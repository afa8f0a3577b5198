"""Entries of a state: their marks and interface, the objects that are one, and their hidden state."""

from __future__ import annotations

import enum
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.format.values import contains_itself
from holdfast.checkpoint.state.tensors import PLAIN
from holdfast.errors import InvalidInput

if TYPE_CHECKING:  # these modules look for entries in values, so they import this one
    from holdfast.checkpoint.state.load import Load
    from holdfast.checkpoint.state.tensor_table import TensorTable


class Replication(enum.Enum):
    """Ranks that hold the true bytes of a tensor."""

    REPLICATED = "replicated"  # all ranks hold the same bytes; any may write them
    LOWEST = "lowest"  # all ranks hold it, but rank 0's bytes are the true ones
    PER_RANK = "per rank"  # every rank has its own
    OWN = "own"  # every rank has its own, except for tensors that are sharded by themselves


class MarkedObject(Struct, frozen=True):
    """An object of the state, marked by the user with the replication of its tensors."""

    value: Any
    replication: Replication
    ranks: tuple[int, ...] | None = None  # its holders, if the user has named them


def replicated(value: Any, ranks: Iterable[int] | None = None) -> MarkedObject:
    """Mark an object of the state as the same on every rank. Each tensor is written once.

    Use it for large objects that are per rank by default (anything but modules and optimizers). If the ranks
    differ nevertheless, the tensors of all ranks but one are lost.

    Args:
        ranks: the global ranks that hold it, if not all ranks that have its key; the same on each of them.
    """
    value = value.value if isinstance(value, MarkedObject) else value
    return MarkedObject(value, Replication.REPLICATED, None if ranks is None else tuple(sorted(set(ranks))))


def per_rank(value: Any) -> MarkedObject:
    """Mark an object of the state as different on every rank. Every rank writes its tensors.

    Use it for modules whose parameters differ from rank to rank. A sharded tensor in it counts as this rank's
    local part.
    """
    return MarkedObject(value.value if isinstance(value, MarkedObject) else value, Replication.PER_RANK)


class StateEntry(ABC):
    """An object under a top-level key. Implementations are final."""

    is_first: ClassVar[bool] = False  # captured and planned before others, which use its tensors' names
    is_filled: ClassVar[bool] = False  # its tensors are filled in place

    def __init__(self, key: str, value: Any, replication: Replication | None = None) -> None:
        self.key = key
        self.value = value
        self.replication = replication  # of its tensors, if the user has marked it

    @abstractmethod
    def capture(self, table: TensorTable) -> Any:
        """Collect all tensors, and return the entry's encoded values."""

    @abstractmethod
    def plan(self, plan: Load) -> None:
        """Extend the plan by how the entry is filled from the checkpoint. Changes nothing live.

        A new object, in place of one that cannot be changed, goes into `plan.replaced` by a step of the plan.
        """


_SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, *PLAIN})
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
    """Return True for an object that is always saved under its own key: with a state, or marked."""
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, (type, torch.Tensor)):
        return False
    return kind is MarkedObject or is_stateful(value) or is_generator(value)


class FoundEntry(Struct, frozen=True):
    """An object of a state or in its containers, with its mark."""

    root: str  # top-level key
    value: Any
    replication: Replication | None = None
    ranks: tuple[int, ...] | None = None


def find_entries(objects: Mapping[str, Any]) -> dict[str, FoundEntry]:
    """Return the objects of a state, and the entries in its containers, by key path."""
    found: dict[str, FoundEntry] = {}
    for key, value in objects.items():
        top = _add(found, key, FoundEntry(key, value))
        try:
            for path, inner in () if is_entry(top.value) else nested_entries(top.value, key):
                _check_mark(path, inner, key)
                _add(found, path, replace(top, value=inner))
        except RecursionError as error:
            raise contains_itself(key) from error
    return found


def _add(found: dict[str, FoundEntry], key: str, new: FoundEntry) -> FoundEntry:
    """Add an object, and return it without its mark. In a marked container it has the container's mark."""
    if isinstance(mark := new.value, MarkedObject):
        new = FoundEntry(new.root, mark.value, mark.replication, mark.ranks)
    other = found.setdefault(key, new)
    if other is not new:
        kinds = [type(each.value).__qualname__ for each in (other, new)]
        raise InvalidInput(
            f"Two objects of the state would both be saved under {key!r}: a {kinds[0]} in {other.root!r} and "
            f"a {kinds[1]} in {new.root!r}. Keys are ambiguous if one contains a dot, or a number and a "
            "string look the same. Nothing was written. Rename one of the keys.",
            key=key,
        )
    return new


def _check_mark(path: str, inner: Any, key: str) -> None:
    if not isinstance(inner, MarkedObject) or is_entry(inner.value) or isinstance(inner.value, torch.Tensor):
        return
    raise InvalidInput(
        f"{path} is a marked {type(inner.value).__qualname__} inside a container. Only tensors and objects "
        "with a state of their own can be marked there. Nothing was written. Mark the whole "
        f"{key!r}, or move it to a key of its own.",
        key=path,
    )


def nested_entries(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the key path and object of each entry in a container at a path, at any depth."""
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


HIDDEN = "@hidden"  # key of this state beside the items of a state_dict()
_WRAPPERS = frozenset({"ScheduleFreeWrapper", "ScheduleFreeWrapperReference"})


def hidden_state(value: Any) -> dict[str, Any]:
    """Return plain values by the path of an attribute, which no state_dict() has; empty for most objects."""
    # A metric of torchmetrics counts its updates, by which its mean states are weighted. The wrappers of
    # schedulefree move parameters between two places, and `train_mode` is the present one.
    if isinstance(value, torch.nn.Module):
        package: Any = sys.modules.get("torchmetrics")
        metrics = () if package is None else _metrics(value, package)
        return {f"{path}._update_count": int(metric._update_count) for path, metric in metrics}
    return {"train_mode": bool(value.train_mode)} if _is_wrapper(value) else {}


def set_hidden_state(value: Any, saved: Mapping[str, Any]) -> None:
    """Set what `hidden_state` has returned. Attributes that a live object does not have are left out."""
    package: Any = sys.modules.get("torchmetrics")
    if isinstance(value, torch.nn.Module):
        for path, metric in () if package is None else _metrics(value, package):
            if (count := saved.get(f"{path}._update_count")) is not None:
                metric._update_count = count
                metric._computed = None  # a result of the state before
    elif _is_wrapper(value) and "train_mode" in saved:
        value.train_mode = saved["train_mode"]


def _metrics(module: torch.nn.Module, package: Any) -> Iterator[tuple[str, Any]]:
    for path, metric in module.named_modules():
        if isinstance(metric, package.Metric) and hasattr(metric, "_update_count"):
            yield path, metric


def _is_wrapper(value: Any) -> bool:
    return any(
        one.__name__ in _WRAPPERS and one.__module__.partition(".")[0] == "schedulefree"
        for one in type(value).__mro__
    )
