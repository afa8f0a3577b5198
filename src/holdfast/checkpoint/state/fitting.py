"""Saved values fitted to live ones, whose types a checkpoint only names."""

from __future__ import annotations

import argparse
import collections
import enum
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoint.format.composites import DTENSOR, SavedTensor, shown_type
from holdfast.checkpoint.format.named_types import NAMED_TYPES, SavedDataclass, SavedEnum, SavedNamedTuple
from holdfast.checkpoint.format.values import EntryRef, encode
from holdfast.checkpoint.state.composites import Composite, take_apart
from holdfast.checkpoint.state.containers import (
    FittedTensor,
    field_names,
    has_name,
    is_dataclass,
    is_named_tuple,
    kind_of,
    member_of,
    new_dataclass,
    type_name,
)
from holdfast.checkpoint.state.entry import holds_entry, is_entry
from holdfast.checkpoint.state.tensors import is_composite
from holdfast.checkpoint.state.tree import facts_of
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.system.documents import shown

_ABSENT = object()  # no live value is in this place
_GONE = object()  # an object that the live state does not hold
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)


class Misfit(InvalidInput):
    """A saved value that the live state has no value of the same type for."""


@dataclass(slots=True)
class Fitting:
    """Result of fitting one saved tree to a live one.

    Args:
        tree: the tree with values of the live types, still with a `TensorRef` for each tensor.
        missing: key paths of fields that only the live state has.
        unexpected: key paths of fields that only the checkpoint has.
    """

    tree: Any = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def fit(saved: Any, live: Any, path: str) -> Fitting:
    """Fit a saved tree to the live value in its place. Changes nothing live.

    A saved type is only looked up in the live value: the place itself, or, for an item that the live
    container does not have yet, an item beside it or the container's `default_factory`. Objects that are
    entries stay where they are in the live containers.

    Raises:
        Misfit: the live state has no value of the same type.
    """
    found = Fitting()
    fitted = _Fitter(found).fit(saved, live, path, is_here=True)
    found.tree = live if fitted is _GONE else fitted
    return found


class _Fitter:
    """One walk over a saved tree and a live one together.

    In its methods, `is_here` is False if `live` is in another place and only shows the types.
    """

    def __init__(self, found: Fitting) -> None:
        self._found = found

    def fit(self, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        if is_here and is_entry(live):
            return live
        kind = type(saved)
        if kind is EntryRef:
            return _GONE
        if kind is SavedTensor:
            return _fit_tensor(saved, live, path)
        if kind is SavedEnum:
            return _fit_member(saved, live, path)
        if kind is SavedNamedTuple:
            return self._fit_named_tuple(saved, live, path, is_here=is_here)
        if kind is SavedDataclass:
            return self._fit_dataclass(saved, live, path, is_here=is_here)
        if kind is collections.defaultdict and type(live) is not kind:
            raise _misfit(path, "collections.defaultdict", live)
        is_container = kind_of(saved) is not None or isinstance(saved, dict)  # a Counter has no items to fit
        if is_container and type(live) is not kind:
            live = self._no_place(live, is_here=is_here)
            if live is not _ABSENT:
                return live
        return self._fit_container(saved, live, path, is_here=is_here)

    def _no_place(self, live: Any, *, is_here: bool) -> Any:
        """Return a live container that must be kept because it holds entries, or `_ABSENT`."""
        return live if is_here and live is not _ABSENT and holds_entry(live) else _ABSENT

    def _fit_container(self, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        if isinstance(saved, dict):
            return self._fit_mapping(saved, live, path, is_here=is_here)
        if isinstance(saved, _NAMESPACES):
            return self._fit_namespace(saved, live, path, is_here=is_here)
        if type(saved) in (list, tuple, collections.deque):
            return self._fit_sequence(saved, live, path, is_here=is_here)
        if type(saved) in (set, frozenset):
            examples = live if type(live) is type(saved) else ()
            return type(saved)(self._fit_key(item, examples, path) for item in saved)
        if is_here and live is not _ABSENT and holds_entry(live):
            return live
        return saved

    def _fit_mapping(self, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        old: Any = {} if live is _ABSENT else live
        factory = getattr(old, "default_factory", None)
        new: list[tuple[Any, Any]] = []
        for saved_key, item in saved.items():
            key = self._fit_key(saved_key, old, path)
            is_known = key in old
            place = old[key] if is_known else _example(item, old.values(), factory)
            fitted = self.fit(item, place, f"{path}.{key}", is_here=is_here and is_known)
            if fitted is not _GONE:
                new.append((key, fitted))
            elif is_known and is_here:
                new.append((key, place))
        if is_here:
            known = {key for key, _ in new}
            new += [(key, item) for key, item in old.items() if key not in known and holds_entry(item)]
        if type(saved) is collections.defaultdict:
            return collections.defaultdict(factory, new)
        return type(saved)(dict(new))  # a Counter of pairs would count these

    def _fit_sequence(self, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        old: list[Any] = [] if live is _ABSENT else list(live)
        new: list[Any] = []
        for i, item in enumerate(saved):
            is_known = i < len(old)
            place = old[i] if is_known else _example(item, old, None)
            fitted = self.fit(item, place, f"{path}.{i}", is_here=is_here and is_known)
            if fitted is not _GONE:
                new.append(fitted)
            elif is_known and is_here:
                new.append(place)
        if is_here:
            last = max((i for i, item in enumerate(old) if holds_entry(item)), default=-1)
            new += old[len(saved) : last + 1]
        return (
            collections.deque(new, saved.maxlen) if isinstance(saved, collections.deque) else type(saved)(new)
        )

    def _fit_namespace(self, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        new = type(saved)()
        if live is _ABSENT:
            vars(new).update(self._fit_mapping(vars(saved), _ABSENT, path, is_here=False))
            return new
        vars(new).update(self._fit_mapping(vars(saved), vars(live), path, is_here=is_here))
        if is_here:
            lost = {name: item for name, item in vars(live).items() if name not in vars(new)}
            self._found.missing += [f"{path}.{name}" for name in lost]
            vars(new).update(lost)
        return new

    def _fit_named_tuple(self, saved: SavedNamedTuple, live: Any, path: str, *, is_here: bool) -> Any:
        if not is_named_tuple(live) or not has_name(type(live), saved.type):
            raise _misfit(path, saved.type, live)
        fields = self._fit_fields(
            dict(saved.fields), dict(zip(live._fields, live, strict=True)), path, is_here
        )
        return tuple.__new__(type(live), fields.values())

    def _fit_dataclass(self, saved: SavedDataclass, live: Any, path: str, *, is_here: bool) -> Any:
        if not is_dataclass(live) or not has_name(type(live), saved.type):
            raise _misfit(path, saved.type, live)
        old = {name: getattr(live, name, _ABSENT) for name in field_names(live)}
        return new_dataclass(type(live), self._fit_fields(saved.fields, old, path, is_here))

    def _fit_fields(
        self, saved: dict[str, Any], old: dict[str, Any], path: str, is_here: bool
    ) -> dict[str, Any]:
        """Return the values of all fields of a live type. Fields that only one side has are recorded."""
        self._found.unexpected += [f"{path}.{name}" for name in saved if name not in old]
        self._found.missing += [f"{path}.{name}" for name in old if name not in saved]
        new = dict(old)
        for name in [name for name in old if name in saved]:
            fitted = self.fit(saved[name], old[name], f"{path}.{name}", is_here=is_here)
            if fitted is _GONE and not is_here:
                raise _misfit(f"{path}.{name}", "object with a state of its own", _ABSENT)
            new[name] = old[name] if fitted is _GONE else fitted
        return new

    def _fit_key(self, saved: Any, live: Iterable[Any], path: str) -> Any:
        """Return a dict's key or a set's item in its live type."""
        if isinstance(saved, NAMED_TYPES) or type(saved) in (tuple, frozenset):
            return self.fit(saved, _example(saved, live, None), f"{path}.<key>", is_here=False)
        return saved


def _fit_tensor(saved: SavedTensor, live: Any, path: str) -> Any:
    """Return a composite tensor with the live one, if its type needs one."""
    if needs_live(saved) and (why := misfit(saved, live)) is not None:
        raise Misfit(
            f"{path} does not fit: {why}. A checkpoint only names classes, and never imports them. Nothing "
            "was changed. Put a tensor of this class with the same description there before the restore, or "
            "use strict=False to leave the live value.",
            key=path,
        )
    return fit_composite(saved, live)


def _fit_member(saved: SavedEnum, live: Any, path: str) -> enum.Enum:
    if not isinstance(live, enum.Enum) or not has_name(type(live), saved.type):
        raise _misfit(path, saved.type, live)
    member = member_of(type(live), saved.name)
    if member is None:
        raise Misfit(
            f"{path} was saved as {type(live).__qualname__}.{saved.name}, which this class does not have. "
            "Nothing was changed. Add the member, or use strict=False to leave the live value.",
            key=path,
        )
    return member


def _example(saved: Any, others: Iterable[Any], factory: Any) -> Any:
    """Return a live item whose type a new item takes, or `_ABSENT`."""
    if isinstance(saved, NAMED_TYPES):
        found = next((one for one in others if has_name(type(one), saved.type)), _ABSENT)
    elif isinstance(saved, SavedTensor):
        found = next((one for one in others if misfit(saved, one) is None), _ABSENT)
    elif kind_of(saved) is not None or type(saved) in (set, frozenset):
        found = next((one for one in others if type(one) is type(saved)), _ABSENT)
    else:
        return _ABSENT
    return factory() if found is _ABSENT and factory is not None else found


def _misfit(path: str, name: str, live: Any) -> Misfit:
    found = "nothing" if live is _ABSENT else f"a {type_name(type(live)).replace(':', '.')}"
    kind = name.replace(":", ".")
    return Misfit(
        f"{path} was saved as a {kind}, but the live state holds {found} there. A checkpoint only names "
        "types, and never imports them. Nothing was changed. Put an object of this type there before the "
        "restore, or use strict=False to leave the live value.",
        key=path,
    )


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
