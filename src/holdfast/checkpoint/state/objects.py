"""State entries besides modules and optimizers: objects with state_dict(), tensors, generators, values."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.values import TensorRef, encode
from holdfast.checkpoint.state.entry import (
    HIDDEN,
    MarkedObject,
    Replication,
    StateEntry,
    has_only_entries,
    hidden_state,
    set_hidden_state,
)
from holdfast.checkpoint.state.load import Load, LoadPhase, Maker, fill_composite
from holdfast.checkpoint.state.rng import MISFITS, set_state, state_of
from holdfast.checkpoint.state.sharding import is_divided, shape_of
from holdfast.checkpoint.state.tensor_table import Role, TensorTable
from holdfast.checkpoint.state.tensors import is_composite, may_be_sharded
from holdfast.checkpoint.state.tree import Extraction, has_saved_form, references
from holdfast.errors import HoldfastError, InvalidInput, ResumeWarning
from holdfast.system.callsite import warn

_PARTLY = "The state may be partly restored: do not train with it."
_NOT_REPEATABLE = ("accelerate", "torch", "torchdata", "datasets")


def _content(state: Any, key: str) -> tuple[Any, list[torch.Tensor]]:
    """Return the encoded values of a state_dict(), and copies of its tensors."""
    tensors: list[torch.Tensor] = []
    walk = Extraction(lambda _, one: tensors.append(one.detach().clone()), named_types=True)
    return encode(walk.extract(state, key), key), tensors


def _is_equal(a: tuple[Any, list[torch.Tensor]], b: tuple[Any, list[torch.Tensor]]) -> bool:
    return a[0] == b[0] and all(
        one.shape == other.shape and torch.equal(one.cpu().nan_to_num(), other.to(one).cpu().nan_to_num())
        for one, other in zip(a[1], b[1], strict=True)
    )


@final
class StatefulEntry(StateEntry):
    """An object with state_dict() and load_state_dict(): a scheduler, a scaler, a data loader.

    Optimizers with save code of their own are included. If tensors may be sharded, `state_dict()` is also
    called before a load: tensors that it returns as DTensors are passed to `load_state_dict()` as DTensors.
    """

    @override
    def capture(self, table: TensorTable) -> Any:
        try:
            state = self.value.state_dict()
        except HoldfastError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"{self.key}: {type(self.value).__qualname__}.state_dict() failed: {error!r}. Nothing was "
                "written. Make it return the object's state, or leave the object out of the state.",
                key=self.key,
            ) from error
        hidden = hidden_state(self.value)
        whole = {**state, HIDDEN: hidden} if hidden else state
        return table.encode(whole, self.key, Role(self.replication or Replication.OWN), named_types=True)

    @override
    def plan(self, plan: Load) -> None:
        if plan.lacks(self.key):
            return
        tree = plan.values(self.key)
        made: dict[str, Maker] = {}
        if has_saved_form(tree) or may_be_sharded():
            fitting = plan.fit(tree, self.value.state_dict(), self.key)
            if fitting is None:
                return
            tree = fitting.tree
            for name, live, _ in fitting.places:
                if is_divided(live) and shape_of(live) == plan.shape(name):  # the live one stays unchanged
                    made[name] = plan.read_like(name, live, f"{self.key}: {name}")
        self._load(lambda: _rehearse(self.value, tree), "Nothing was changed.")
        make = plan.read_tree(tree, made=made)
        plan.add_step(LoadPhase.OBJECT, lambda: self._finish(make()))

    def _finish(self, state: Any) -> None:
        if hidden_state(self.value) and HIDDEN in state:
            set_hidden_state(self.value, state.pop(HIDDEN))
        is_ordered = type(state) is collections.OrderedDict
        if is_ordered and hasattr(live := self.value.state_dict(), "_metadata"):
            # Such as a TensorDict's: part of its structure, which it checks.
            state.__dict__["_metadata"] = live._metadata
        # Calling state_dict() again changes nothing, which data loaders do not guarantee.
        is_repeatable = type(self.value).__module__.partition(".")[0] not in _NOT_REPEATABLE
        saved = _content(state, self.key) if is_repeatable and not may_be_sharded() else None
        self._load(lambda: self.value.load_state_dict(state), _PARTLY)
        if saved is not None and not _is_equal(saved, _content(self.value.state_dict(), self.key)):
            warn(
                f"{self.key}: after load_state_dict() the state_dict() of this "
                f"{type(self.value).__qualname__} differs from the saved one, so a part of it was not "
                "restored. Make load_state_dict() set everything that state_dict() returns.",
                ResumeWarning,
            )

    def _load(self, load: Callable[[], object], outcome: str) -> None:
        try:
            load()
        except Exception as error:
            kind = type(self.value).__qualname__
            raise InvalidInput(
                f"{self.key}: {kind}.load_state_dict() rejected the state saved under this key: {error!r}. "
                f"{outcome} Make the object as it was when it was saved, or leave it out with only=.",
                key=self.key,
            ) from error


@final
class TensorEntry(StateEntry):
    """A tensor, filled in place."""

    is_first = True
    is_filled = True

    @override
    def capture(self, table: TensorTable) -> Any:
        is_parameter = isinstance(self.value, torch.nn.Parameter)
        role = Role(self.replication or Replication.OWN, is_named=is_parameter)
        if is_composite(self.value):
            return table.encode_composite(self.key, self.value, role)
        table.collect(self.key, self.value, role)
        return encode(TensorRef(self.key), self.key)

    @override
    def plan(self, plan: Load) -> None:
        saved = plan.saved_names.get(self.key)
        if saved is None and isinstance(composite := plan.values(self.key), SavedTensor):
            fill_composite(plan, composite, self.value, self.key)
        elif saved is None:
            plan.missing.append(self.key)
        elif (choose := plan.read_apart(saved, self.value)) is not None:
            plan.add_step(LoadPhase.VALUE, lambda: _replace(plan, self, choose()))
        else:
            plan.fill(saved, self.value, self.key)


@final
class GeneratorEntry(StateEntry):
    """A random number generator of torch, python or numpy."""

    @override
    def capture(self, table: TensorTable) -> Any:
        return table.encode(state_of(self.value), self.key, Role(self.replication or Replication.OWN))

    @override
    def plan(self, plan: Load) -> None:
        if plan.lacks(self.key):
            return
        tree = plan.values(self.key)
        if isinstance(self.value, torch.Generator):
            if not isinstance(tree, TensorRef):
                raise self._misfit(f"it is of {type(tree).__qualname__}", "Nothing was changed.")
            size, expected = plan.shape(tree.name), tuple(self.value.get_state().shape)
            if size != expected:
                raise self._misfit(f"it has shape {size}, expected {expected}", "Nothing was changed.")
        else:  # tried on a copy, before anything live changes
            self._set(copy.deepcopy(self.value), tree, "Nothing was changed.")
        make = plan.read_tree(tree)
        plan.add_step(LoadPhase.OBJECT, lambda: self._set(self.value, make(), _PARTLY))

    def _set(self, generator: Any, state: Any, outcome: str) -> None:
        try:
            set_state(generator, state)
        except MISFITS as error:
            raise self._misfit(repr(error), outcome) from error

    def _misfit(self, why: str, outcome: str) -> InvalidInput:
        kind = type(self.value).__qualname__
        return InvalidInput(
            f"{self.key} is a {kind}, but the state in the checkpoint does not fit it: {why}. {outcome} Use "
            "the kind of generator that was saved, or leave it out with only=.",
            key=self.key,
        )


@final
class ValueEntry(StateEntry):
    """A plain value, or a container of values, tensors and entries.

    Containers are updated in place, so that other references to them see the restored content. Values that
    cannot be changed in place are replaced under the key. Values of the program's own types are only
    restored into live ones of the same type, see `holdfast.checkpoint.state.fitting`.
    """

    is_filled = True

    @override
    def capture(self, table: TensorTable) -> Any:
        role = Role(self.replication or Replication.OWN)
        return table.encode(self.value, self.key, role, named_types=True, entries=True)

    @override
    def plan(self, plan: Load) -> None:
        if self.key not in plan.keys and has_only_entries(self.value):
            return  # it was saved in another container, or its objects under keys of their own
        if plan.lacks(self.key):
            return
        fitting = plan.fit(plan.values(self.key), self.value, self.key)
        if fitting is None:
            return
        made: dict[str, Maker] = {}
        for name, live, _ in fitting.places:
            is_equal = tuple(live.shape) == plan.shape(name) and live.dtype is plan.dtype(name)
            if not is_divided(live) and (live.is_meta or not is_equal):
                continue  # replaced; but a plain tensor cannot replace a sharded one
            choose = plan.read_apart(name, live)
            if choose is None:
                plan.fill(name, live, f"{self.key}: {name}")
            made[name] = choose or (lambda live=live: live)
        make = plan.read_tree(fitting.tree, made=made)
        plan.add_step(LoadPhase.VALUE, lambda: _replace(plan, self, plan.updates.update(self.value, make())))


def _replace(plan: Load, entry: StateEntry, new: Any) -> None:
    """Put a new value into the state, unless it is the one of the entry."""
    if new is not entry.value:
        plan.replaced[entry.key] = MarkedObject(new, entry.replication) if entry.replication else new


def _rehearse(value: Any, state: Any) -> None:
    """Load the state of one of PyTorch's schedulers or scalers into a copy; raise if they reject it."""
    # Their load code sets attributes and has no other effect. Code of other libraries or of the program may
    # have any, so it is not called twice. A state with tensors is not complete before they are read.
    if not _is_pytorchs(value) or any(True for _ in references(state)):
        return
    try:
        trial = _apart(value)
    except Exception:  # noqa: BLE001 - a function of the program, in a scheduler, may refuse copies
        return
    trial.load_state_dict(copy.deepcopy(state))


def _is_pytorchs(value: Any) -> bool:
    return (
        isinstance(value, (LRScheduler, torch.amp.GradScaler))
        and type(value).load_state_dict.__module__.startswith("torch.")
        and all(map(_is_pytorchs, getattr(value, "_schedulers", ())))
    )


def _apart(item: Any) -> Any:
    """Return a copy that shares only what load code leaves alone."""
    if isinstance(item, list):
        return [_apart(one) for one in item]
    if isinstance(item, (LRScheduler, torch.amp.GradScaler)):
        new = object.__new__(type(item))
        vars(new).update({name: _apart(one) for name, one in vars(item).items()})
        return new
    if isinstance(item, torch.Tensor):  # of one element
        return item.clone()
    return copy.copy(item) if callable(item) else item  # a lambda of a LambdaLR may be an object
