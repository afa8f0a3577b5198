"""Everything that is neither module nor optimizer: objects with state_dict(), tensors, generators, values."""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from holdfast.callsite import warn
from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.format.values import TensorRef, encode
from holdfast.state.capture import Sink
from holdfast.state.entry import Entry
from holdfast.state.load import Phase, Plan
from holdfast.state.review import is_repeatable
from holdfast.state.rng import python_state, set_python_state
from holdfast.state.sharding import is_dtensor, may_be_sharded
from holdfast.state.spread import Marked, Spread
from holdfast.state.table import Role
from holdfast.state.tree import graft, meet, references, strip, update


def _content(state: Any, key: str) -> tuple[Any, list[torch.Tensor]]:
    """The values of a state_dict(), encoded, and copies of its tensors."""
    tensors: list[torch.Tensor] = []
    values = encode(strip(state, key, lambda _, tensor: tensors.append(tensor.detach().clone())), key)
    return values, tensors


def _is_equal(a: tuple[Any, list[torch.Tensor]], b: tuple[Any, list[torch.Tensor]]) -> bool:
    return a[0] == b[0] and all(
        one.shape == other.shape and torch.equal(one.cpu().nan_to_num(), other.to(one).cpu().nan_to_num())
        for one, other in zip(a[1], b[1], strict=True)
    )


def is_stateful(value: Any) -> bool:
    """True if an object has state_dict() and load_state_dict()."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_generator(value: Any) -> bool:
    """True for a torch, python or numpy random number generator."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


@final
class StatefulEntry(Entry):
    """An object with state_dict() and load_state_dict(): a scheduler, a scaler, a data loader.

    Optimizers with save code of their own are among them. Where tensors may be sharded, `state_dict()` is
    also asked before a load: what it has as a DTensor, `load_state_dict()` gets as one.
    """

    def capture(self, sink: Sink) -> Any:
        """See `Entry.capture`."""
        return encode(
            strip(self.value.state_dict(), self.key, sink.emitter(self.spread or Spread.OWN)), self.key
        )

    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """See `Entry.plan`."""
        if not may_be_sharded():
            _plan_tree(plan, self.key, self._finish)
            return
        if plan.lacks(self.key):
            return
        made: dict[str, Callable[[], torch.Tensor]] = {}

        def claim(name: str, live: torch.Tensor) -> bool:
            """Have a tensor made like a DTensor that the object has now; its own is left alone till then."""
            if is_dtensor(live) and tuple(live.shape) == plan.shape(name) and name not in made:
                made[name] = plan.like(name, live, f"{self.key}: {name}")
            return False

        tree = plan.values(self.key)
        meet(tree, self.value.state_dict(), claim)
        for name in references(tree):
            if name not in made:
                plan.fresh(name)

        def tensor(name: str) -> torch.Tensor:
            return made[name]() if name in made else plan.tensor(name)

        plan.do(Phase.OBJECT, lambda: self._finish(graft(tree, tensor)))

    def _finish(self, state: Any) -> None:
        is_ordered = type(state) is collections.OrderedDict
        if is_ordered and hasattr(live := self.value.state_dict(), "_metadata"):
            state.__dict__["_metadata"] = (
                live._metadata
            )  # such as a TensorDict's: part of its structure, which it checks
        saved = _content(state, self.key) if is_repeatable(self.value) and not may_be_sharded() else None
        self._load(state)
        if saved is not None and not _is_equal(saved, _content(self.value.state_dict(), self.key)):
            warn(
                f"{self.key}: after load_state_dict() the state_dict() of this "
                f"{type(self.value).__qualname__} is other than what was saved, so a part of it did not come "
                "back. Have load_state_dict() take all that state_dict() returns.",
                ResumeWarning,
            )

    def _load(self, state: Any) -> None:
        try:
            self.value.load_state_dict(state)
        except Exception as error:
            kind = type(self.value).__qualname__
            message = f"{self.key}: {kind}.load_state_dict() refused what was saved under this key: {error!r}"
            raise InvalidInput(message, key=self.key) from error


@final
class TensorEntry(Entry):
    """A tensor, filled in place."""

    def capture(self, sink: Sink) -> Any:
        """See `Entry.capture`."""
        sink.take(self.key, self.value, self._role())
        return encode(TensorRef(self.key), self.key)

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor, Role]]:
        """See `Entry.named_tensors`."""
        return [(self.key, self.value, self._role())]

    def _role(self) -> Role:
        return Role(self.spread or Spread.OWN, is_named=isinstance(self.value, torch.nn.Parameter))

    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """See `Entry.plan`."""
        saved = plan.saved_names.get(self.key)
        if saved is None:
            plan.missing.append(self.key)
        else:
            plan.fill(saved, self.value, self.key)


@final
class GeneratorEntry(Entry):
    """A random number generator of torch, python or numpy."""

    def capture(self, sink: Sink) -> Any:
        """See `Entry.capture`."""
        generator = self.value
        if isinstance(generator, torch.Generator):
            sink.add(self.key, generator.get_state(), self.spread or Spread.OWN)
            return encode(TensorRef(self.key), self.key)
        if isinstance(generator, random.Random):
            return encode(python_state(generator), self.key)
        if hasattr(generator, "bit_generator"):
            return encode(generator.bit_generator.state, self.key)
        return encode(generator.get_state(legacy=False), self.key)

    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """See `Entry.plan`."""
        _plan_tree(plan, self.key, self._finish)

    def _finish(self, state: Any) -> None:
        generator = self.value
        try:
            if isinstance(generator, torch.Generator):
                generator.set_state(state.cpu())
            elif isinstance(generator, random.Random):
                set_python_state(generator, state)
            elif hasattr(generator, "bit_generator"):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            kind = type(generator).__qualname__
            message = f"{self.key} is a {kind}, and the checkpoint has no state that fits one: {error!r}"
            raise InvalidInput(message, key=self.key) from error


@final
class ValueEntry(Entry):
    """A plain value, or a container of values and tensors.

    Containers are updated in place, so that references to them from elsewhere see the restored content;
    what cannot be changed in place is stored under the key anew.
    """

    def capture(self, sink: Sink) -> Any:
        """See `Entry.capture`."""
        return encode(strip(self.value, self.key, sink.emitter(self.spread or Spread.OWN)), self.key)

    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """See `Entry.plan`."""
        if plan.lacks(self.key):
            return

        def claim(name: str, live: torch.Tensor) -> bool:
            is_equal = tuple(live.shape) == plan.shape(name) and live.dtype is plan.dtype(name)
            if not is_dtensor(live) and (live.is_meta or not is_equal):
                return False  # replaced; but a plain tensor cannot stand in for a DTensor
            plan.fill(name, live, f"{self.key}: {name}")
            return True

        tree = meet(plan.values(self.key), self.value, claim)
        for name in references(tree):
            plan.fresh(name)

        def finish() -> None:
            new = update(self.value, graft(tree, plan.tensor))
            if new is not self.value:
                put(Marked(new, self.spread) if self.spread else new)

        plan.do(Phase.VALUE, finish)


def _plan_tree(plan: Plan, key: str, finish: Callable[[Any], None]) -> None:
    """Have `finish` called with the saved tree of `key`, its tensors filled."""
    if plan.lacks(key):
        return
    tree = plan.values(key)
    for name in references(tree):
        plan.fresh(name)
    plan.do(Phase.OBJECT, lambda: finish(graft(tree, plan.tensor)))
