"""Saved values fitted to live ones, whose types a checkpoint only names, and live ones updated with them."""

from __future__ import annotations

import collections
import enum
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.checkpoint.format import containers
from holdfast.checkpoint.format.composites import DTENSOR, SavedTensor, shown_type
from holdfast.checkpoint.format.containers import ContainerKind
from holdfast.checkpoint.format.values import (
    NAMED_TYPES,
    EntryRef,
    SavedDataclass,
    SavedEnum,
    SavedNamedTuple,
    TensorRef,
    encode,
)
from holdfast.checkpoint.state.composites import take_apart
from holdfast.checkpoint.state.entry import holds_entry, is_entry
from holdfast.checkpoint.state.tensors import FilledMemory, is_composite, is_sparse
from holdfast.checkpoint.state.tree import facts_of, has_name, member_of, type_name
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.system.documents import shown

if TYPE_CHECKING:  # it fits values, so it imports this file
    from holdfast.checkpoint.state.load import Load

_ABSENT = object()  # no live value is in this place
GONE = object()  # an object that the live state does not hold


class Misfit(InvalidInput):
    """A saved value that the live state has no value of the same type for."""


class Fitting(Struct):
    """One walk over a saved tree and the live value in its place, and its result. It changes nothing live.

    A saved type is only looked up in the live value: the place itself, or, for an item that the live
    container does not have yet, an item beside it or the container's `default_factory`. Objects that are
    entries stay where they are in the live containers.
    """

    tree: Any = None  # with values of the live types, still with a `TensorRef` for each tensor
    missing: list[str] = []  # key paths of fields that only the live state has
    unexpected: list[str] = []  # of those that only the checkpoint has
    places: list[tuple[str, torch.Tensor, str]] = []  # saved name, the live plain tensor there, and key path
    sparse: list[tuple[SavedTensor, torch.Tensor]] = []  # with the live ones, which are replaced as a whole

    def fit(self, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        """Return a saved value in the types of a live one; `is_here` unless that only shows the types."""
        if is_here and is_entry(live):
            return live
        kind = type(saved)
        if kind is EntryRef:
            return GONE
        if kind is SavedTensor or (kind is TensorRef and isinstance(live, torch.Tensor)):
            return self._fit_tensor(saved, live, path, is_here=is_here)
        if kind is SavedEnum:
            return _fit_member(saved, live, path)
        if kind is SavedNamedTuple or kind is SavedDataclass:
            return self._fit_fields(saved, live, path, is_here=is_here)
        if kind is collections.defaultdict and type(live) is not kind:
            raise _misfit(path, "collections.defaultdict", live)
        container = containers.kind_of(saved)
        if container is None or type(live) is not kind:
            if is_here and holds_entry(live):
                return live
            if kind in (set, frozenset):
                examples = live if type(live) is kind else ()
                return kind(self._fit_key(item, examples, path) for item in saved)
            live = _ABSENT
        return saved if container is None else self._fit_items(container, saved, live, path, is_here=is_here)

    def _fit_tensor(self, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        """Return a reference, or a composite tensor with the live one, if its type needs one."""
        if needs_live(saved) and (why := misfit(saved, live)) is not None:
            raise Misfit(
                f"{path} does not fit: {why}. A checkpoint only names classes, and never imports them. "
                "Nothing was changed. Put a tensor of this class with the same description there before the "
                "restore, or use strict=False to leave the live value.",
                key=path,
            )
        return self.pair(saved, live, path, is_here=is_here)

    def pair(self, saved: Any, live: Any, path: str, *, is_here: bool = True) -> Any:
        """Return a saved tensor with the live one of its class, at every depth; record the live tensors."""
        if isinstance(saved, TensorRef):
            if is_here and not is_composite(live):
                self.places.append((saved.name, live, path))
            return saved
        if misfit(saved, live) is not None:
            return saved
        if is_sparse(live):
            if is_here:
                self.sparse.append((saved, live))
            is_here = False  # the number of its elements may differ, so its inner tensors are not filled
        apart = take_apart(live)
        inner = {
            name: self.pair(item, apart.inner[name], f"{path}.{name}", is_here=is_here)
            for name, item in saved.inner.items()
        }
        return replace(saved, inner=inner, live=replace(apart, live=live))

    def _fit_items(self, container: ContainerKind, saved: Any, live: Any, path: str, *, is_here: bool) -> Any:
        """Return a container of the saved items, and of those live ones that it keeps."""
        old: dict[Any, Any] = {} if live is _ABSENT else dict(container.items(live))
        is_default = type(live) is collections.defaultdict
        factory = live.default_factory if is_default else None
        new: dict[Any, Any] = {}
        for saved_step, item in container.items(saved):
            step = self._fit_key(saved_step, old, path)
            is_known = step in old
            place = old[step] if is_known else _example(item, old.values(), factory)
            fitted = self.fit(item, place, f"{path}.{step}", is_here=is_here and is_known)
            if fitted is not GONE:
                new[step] = fitted
            elif is_known and is_here:
                new[step] = place
        if is_here:
            new |= self._kept(saved, {step: item for step, item in old.items() if step not in new}, path)
        return container.rebuild(live if is_default else saved, new.items())

    def _kept(self, saved: Any, left: dict[Any, Any], path: str) -> dict[Any, Any]:
        """Return the live items of a container that stay in it, of those that are not saved."""
        if isinstance(saved, containers.NAMESPACES):
            self.missing += [f"{path}.{name}" for name in left]
            return left
        held = [step for step, item in left.items() if holds_entry(item)]
        if isinstance(saved, dict):
            return {step: left[step] for step in held}
        last = max(held, default=-1)  # in a sequence with all before it, so that its index stays
        return {step: item for step, item in left.items() if step <= last}

    def _fit_fields(
        self, saved: SavedNamedTuple | SavedDataclass, live: Any, path: str, *, is_here: bool
    ) -> Any:
        """Return a value of the live type. Fields that only one side has are recorded."""
        is_same = (
            containers.is_named_tuple(live)
            if isinstance(saved, SavedNamedTuple)
            else containers.is_dataclass(live)
        )
        container = containers.kind_of(live)
        if container is None or not is_same or not has_name(type(live), saved.type):
            raise _misfit(path, saved.type, live)
        new = dict(container.items(live))
        names = list(new) if isinstance(saved, SavedNamedTuple) else containers.field_names(live)
        items = dict(saved.fields)
        self.unexpected += [f"{path}.{name}" for name in items if name not in names]
        self.missing += [f"{path}.{name}" for name in names if name not in items]
        for name in [name for name in names if name in items]:
            fitted = self.fit(items[name], new.get(name, _ABSENT), f"{path}.{name}", is_here=is_here)
            if fitted is not GONE:
                new[name] = fitted
            elif not is_here:
                raise _misfit(f"{path}.{name}", "object with a state of its own", _ABSENT)
        return container.rebuild(live, new.items())

    def _fit_key(self, saved: Any, live: Iterable[Any], path: str) -> Any:
        """Return a dict's key or a set's item in its live type."""
        if isinstance(saved, NAMED_TYPES) or type(saved) in (tuple, frozenset):
            return self.fit(saved, _example(saved, live, None), f"{path}.<key>", is_here=False)
        return saved


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
    elif containers.kind_of(saved) is not None or type(saved) in (set, frozenset):
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


def needs_live(saved: Any) -> bool:
    """Return True if a composite tensor is only built beside a live one."""
    if not isinstance(saved, SavedTensor):
        return False
    return saved.is_class or saved.type == DTENSOR or any(map(needs_live, saved.inner.values()))


def misfit(saved: SavedTensor, live: Any, plan: Load | None = None) -> str | None:
    """Return how a saved composite tensor and a live value differ, or None.

    The number of elements of a sparse tensor may differ, and devices may. With a plan, dtypes and shapes of
    the inner tensors are compared too.
    """
    there = shown_type(saved.type, saved.facts)
    if not isinstance(live, torch.Tensor):
        return f"it was saved as {there}, but nothing of this type is there"
    if not is_composite(live):
        return f"it was saved as {there}, but is a plain {live.dtype} tensor"
    try:
        found = take_apart(live)
        facts = facts_of(found, "the tensor")
        is_same = _comparable(facts) == _comparable(saved.facts)
    except HoldfastError as error:
        return f"its live tensor cannot be used: {error}"
    has_type = found.type == saved.type
    if saved.is_class:
        has_type = found.is_class and has_name(type(live), saved.type)
    if not has_type:
        return f"it was saved as {there}, but is {shown_type(found.type, found.facts)}"
    if list(found.inner) != list(saved.inner):
        return f"it was saved with the inner tensors {list(saved.inner)}, but has {list(found.inner)}"
    if not is_same:
        return _changed(saved, facts)
    each = (_inner_misfit(name, item, found.inner[name], live, plan) for name, item in saved.inner.items())
    return next(filter(None, each), None)


def _inner_misfit(
    name: str, saved: Any, item: torch.Tensor, live: torch.Tensor, plan: Load | None
) -> str | None:
    """Return how a saved inner tensor differs from that of a live composite tensor, or None."""
    why = None
    if isinstance(saved, SavedTensor):
        why = misfit(saved, item, None if is_sparse(live) else plan)
    elif is_composite(item):
        taken = take_apart(item)
        why = f"it was saved as a plain tensor, but is {shown_type(taken.type, taken.facts)}"
    elif plan is not None:
        there, here = (plan.dtype(saved.name), plan.shape(saved.name)), (item.dtype, tuple(item.shape))
        is_free = is_sparse(live) and (name != "values" or there[0] is here[0])  # its content is replaced
        if there != here and not is_free:
            return f"{name} was saved as {there[0]} {list(there[1])}, but is {here[0]} {list(here[1])}"
    return None if why is None else f"{name}: {why}"


def _changed(saved: SavedTensor, facts: dict[str, Any]) -> str:
    """Return how two descriptions differ."""
    if saved.type != DTENSOR:
        return f"its description was {shown(saved.facts)}, but is {shown(facts)}"
    there, here = ([one[name] for name in ("shape", "offsets", "sizes")] for one in (saved.facts, facts))
    return (
        "a DTensor over a composite tensor cannot be resharded, and shape, offsets and sizes of the saved "
        f"part are {there}, but those of the live one {here}. It is restored on the same number of ranks only"
    )


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


class Updates(Struct):
    """The updates of one restore.

    A script may begin with one object in two places, as after `dict.fromkeys(names, [])`, and replace it
    later. So an object that is in two places has the new value of the first one. It stays in the second one
    too if the value there is equal. Otherwise the second place gets a value of its own.
    """

    _first: dict[int, tuple[Any, Any, Any]] = {}
    """By the id of an object: it, its new value, and the result."""
    _memory: FilledMemory = field(default_factory=FilledMemory)  # of arrays

    def update(self, live: Any, new: Any) -> Any:
        """Return the value to use from now on: `live` if it could be made equal in place, else `new`."""
        if live is new or type(live) is not type(new):
            return new
        kind = containers.kind_of(live)
        if isinstance(live, tuple) and kind is not None:
            return self._update_items(kind, live, new)
        if kind is None and not isinstance(live, (set, bytearray)) and not _is_array(live):
            return new
        if (first := self._first.get(id(live))) is not None:
            return first[2] if is_equal(first[1], new) else new
        changed = self._change(live, new) if kind is None else self._update_items(kind, live, new)
        self._first[id(live)] = live, new, changed
        return changed

    def _update_items(self, kind: ContainerKind, live: Any, new: Any) -> Any:
        """Update the items of a container; return it, or a new one if it cannot have other items."""
        places = dict(kind.items(live))
        items = kind.items(new)
        pairs = [(step, self.update(places[step], item) if step in places else item) for step, item in items]
        are_same = all(step in places and item is places[step] for step, item in pairs)
        is_same = are_same and len(pairs) == len(places)
        if is_same and (kind.refill is None or containers.is_dataclass(live)):
            return live  # with what its cached properties have computed
        is_longer = isinstance(live, collections.deque) and live.maxlen != new.maxlen
        if kind.refill is None or is_longer:
            return kind.rebuild(new, pairs)
        kind.refill(live, pairs)
        return live

    def _change(self, live: Any, new: Any) -> Any:
        if isinstance(live, set):
            live.clear()
            live.update(new)
            return live
        if isinstance(live, bytearray):
            live[:] = new
            return live
        if live.shape != new.shape or live.dtype != new.dtype or not live.flags.writeable:
            return new
        if live.flags.c_contiguous and live.nbytes:
            start = live.ctypes.data
            stop = start + live.nbytes
            for low, high in self._memory.overlap(start, stop):
                if live.tobytes()[low - start : high - start] != new.tobytes()[low - start : high - start]:
                    return new
            self._memory.add(start, stop)
        live[...] = new
        return live


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_equal(value: Any, other: Any) -> bool:
    """Return True if two new values are equal bit for bit, NaN included."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value.dtype is other.dtype and value.shape == other.shape and torch.equal(value, other)
    if (kind := containers.kind_of(value)) is not None:
        pairs, others = kind.items(value), kind.items(other)
        return len(pairs) == len(others) and all(
            a[0] == b[0] and is_equal(a[1], b[1]) for a, b in zip(pairs, others, strict=True)
        )
    if _is_array(value):
        is_alike = value.dtype == other.dtype and value.shape == other.shape
        return is_alike and value.tobytes() == other.tobytes()
    return bool(value == other) or (value != value and other != other)
