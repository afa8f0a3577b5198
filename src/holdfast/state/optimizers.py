"""Optimizers: state by the name of the parameter it belongs to, so that groups may be ordered otherwise."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from holdfast.format.values import encode
from holdfast.state.capture import Sink
from holdfast.state.entry import Entry
from holdfast.state.load import Phase, Plan
from holdfast.state.saved import SavedOptimizer, SavedState
from holdfast.state.sharding import is_dtensor, replicated_like
from holdfast.state.slots import Slots, is_slot_name, survey
from holdfast.state.spread import Spread
from holdfast.state.table import Role
from holdfast.state.tree import graft, meet, references, strip, update

Names = Callable[[], dict[int, str]]
_HOOKED_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
"""Code of the function that torch puts around every step(), which runs its hooks."""


def is_plain(optimizer: Optimizer) -> bool:
    """True if an optimizer saves and loads as `torch.optim.Optimizer` does, without code of its own."""
    kind, own = type(optimizer), optimizer.__dict__
    return (
        kind.state_dict is Optimizer.state_dict
        and kind.load_state_dict is Optimizer.load_state_dict
        and "state_dict" not in own
        and "load_state_dict" not in own
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
        and not optimizer._optimizer_load_state_dict_pre_hooks
        and not optimizer._optimizer_load_state_dict_post_hooks
    )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """True if `register_step_pre_hook` works on an optimizer; some wrappers skip the base constructor."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "param_groups")


def stepping() -> str | None:
    """Return the optimizer class whose step() this thread is in the middle of; None if there is none.

    Hooks that an optimizer runs after its step are not in the middle of it.
    """
    inner, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _HOOKED_STEP and inner is not None:
            optimizer = frame.f_locals["args"][0]
            if inner.f_code not in _codes_after_step(optimizer):
                return type(optimizer).__qualname__
        inner, frame = frame, frame.f_back
    return None


def _codes_after_step(optimizer: Optimizer) -> set[object]:
    """Return the code objects of the hooks that an optimizer runs after its step."""
    hooks = [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    hooks = [hook.func if isinstance(hook, functools.partial) else hook for hook in hooks]
    functions = [
        hook if hasattr(hook, "__code__") else getattr(hook, "__func__", type(hook).__call__)
        for hook in hooks
    ]
    return {getattr(function, "__code__", None) for function in functions}


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@final
class OptimizerEntry(Entry):
    """An optimizer without save and load code of its own.

    State stays in the dtype in which it was saved: `Optimizer.load_state_dict` would cast it to the dtype of
    its parameter, which rounds float32 moments of bfloat16 parameters.

    Args:
        key: the top-level key.
        value: the optimizer.
        spread: how its tensors are spread over the ranks, if the user has said so.
        names: answers the names of all live parameters of the state by id.
    """

    def __init__(self, key: str, value: Optimizer, spread: Spread | None, names: Names) -> None:
        super().__init__(key, value, spread)
        self._names = names
        self._slots: Slots | None = None  # None also if the state is of a kind that has none

    def capture(self, sink: Sink) -> Any:
        """See `Entry.capture`."""
        names, slots = sink.parameter_names, self._slots
        values = slots.read(self.value, names) if slots is not None else None
        if slots is None or values is None:
            named = [list(_named(i, group, names)) for i, group in enumerate(self.value.param_groups)]
            prefix = f"{self.key}.state."
            slots = survey(self.value, names, named, prefix, lambda *pair: self._role(sink, *pair))
            values = slots.read(self.value, names) if slots is not None else None
            self._slots = slots
            if slots is None or values is None:
                return self._capture_each(sink, named)
        groups = self._capture_groups(sink, slots.fqns)
        sink.take_all(slots.names, slots.roles, slots.tensors(values))
        return {"param_groups": groups, "state": encode(slots.others(values), f"{self.key}.state")}

    def _capture_each(self, sink: Sink, named: list[list[tuple[str, torch.Tensor]]]) -> Any:
        """Capture state of any kind: with containers, or that belongs to no parameter."""
        other: dict[str, Any] = {}
        shared: dict[Any, Any] = {}
        groups = self._capture_groups(sink, [[fqn for fqn, _ in group] for group in named])
        for fqn, parameter in chain.from_iterable(named):
            if state := self.value.state.get(parameter):
                self._capture_state(sink, fqn, parameter, state, other)
        for name, value in self.value.state.items():
            if not isinstance(name, torch.Tensor):
                emit = sink.emitter_of(Role(self.spread or Spread.REPLICATED, is_owned=True))
                shared[name] = strip(value, f"{self.key}.shared.{name}", emit)
        values = {"param_groups": groups, "state": encode(other, f"{self.key}.state")}
        if shared:
            values["shared"] = encode(shared, f"{self.key}.state")
        return values

    def _capture_groups(self, sink: Sink, fqns: list[list[str]]) -> list[dict[str, Any]]:
        groups = zip(self.value.param_groups, fqns, strict=True)
        return [self._capture_group(sink, i, group, names) for i, (group, names) in enumerate(groups)]

    def _capture_group(
        self, sink: Sink, index: int, group: dict[str, Any], fqns: list[str]
    ) -> dict[str, Any]:
        emit = sink.emitter(self.spread or Spread.REPLICATED)
        options = {
            name: strip(value, f"{self.key}.param_groups.{index}.{name}", emit)
            for name, value in group.items()
            if name != "params"
        }
        # A copy of the names: what was captured must not change with what is kept here.
        return {"params": list(fqns), **encode(options, f"{self.key}.param_groups[{index}]")}

    def _capture_state(
        self, sink: Sink, fqn: str, parameter: torch.Tensor, state: dict[Any, Any], other: dict[str, Any]
    ) -> None:
        prefix, role = f"{self.key}.state.{fqn}.", self._role(sink, fqn, parameter)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and is_slot_name(name):
                sink.take(prefix + name, value, role)
            else:
                emit = sink.emitter_of(role)
                other.setdefault(fqn, {})[name] = strip(value, f"{prefix}{name}", emit)

    def _role(self, sink: Sink, fqn: str, parameter: torch.Tensor) -> Role:
        spread = self._spread_of(sink, fqn, parameter)
        follows = fqn if spread is Spread.REPLICATED and id(parameter) in sink.parameter_names else None
        return Role(spread, is_owned=True, follows=follows)

    def _spread_of(self, sink: Sink, fqn: str, parameter: torch.Tensor) -> Spread:
        """State is spread as its parameter is; a parameter outside the state may be anything."""
        if self.spread is not None:
            return self.spread
        if id(parameter) not in sink.parameter_names:
            return Spread.OWN
        return Spread.PER_RANK if sink.is_per_rank(fqn) else Spread.REPLICATED

    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """See `Entry.plan`."""
        if plan.lacks(self.key):
            return
        saved = SavedOptimizer(self.key, plan)
        groups = [list(_named(i, group, self._names())) for i, group in enumerate(self.value.param_groups)]
        chosen = [saved.choose(i, [fqn for fqn, _ in group]) for i, group in enumerate(groups)]
        for options, group in zip(chosen, groups, strict=True):
            for fqn, parameter in group:
                if (one := saved.take(fqn)) is not None:
                    self._plan_state(plan, parameter, one, options or {})
        saved.skip_the_rest()
        self._plan_groups(plan, chosen)
        self._plan_shared(plan, saved.shared)
        plan.do(Phase.OPTIMIZER, self._settle)

    def _plan_state(
        self, plan: Plan, parameter: torch.Tensor, saved: SavedState, options: dict[str, Any]
    ) -> None:
        live: dict[Any, Any] = self.value.state.get(parameter, {})
        kept: dict[str, torch.Tensor] = {}
        made: dict[str, Callable[[], torch.Tensor]] = {}
        for name, saved_name in saved.tensors.items():
            device = _device(name, plan, saved_name, parameter, options)
            if _fits(live.get(name), plan, saved_name, device if name == "step" else None):
                kept[name] = live[name]
                plan.fill(saved_name, live[name], saved_name)
            else:
                made[name] = _new(plan, saved_name, parameter, device)
        for name in references(saved.trees):
            plan.fresh(name, plan.place(parameter))

        def finish() -> None:
            place = plan.place(parameter)
            state: dict[Any, Any] = dict(kept)
            state.update({name: make() for name, make in made.items()})
            state.update(graft(saved.trees, lambda name: plan.tensor(name, place)))
            if state:
                self.value.state[parameter] = state
            else:
                self.value.state.pop(parameter, None)

        plan.do(Phase.OPTIMIZER, finish)

    def _plan_groups(self, plan: Plan, chosen: list[dict[str, Any] | None]) -> None:
        met: list[dict[str, Any]] = []
        for i, options in enumerate(chosen):
            live = self.value.param_groups[i]
            tree = {k: v for k, v in (options or {}).items() if k not in ("params", "param_names")}
            claim = _claim(plan, f"{self.key}.param_groups.{i}")
            tree = {name: meet(value, live.get(name), claim) for name, value in tree.items()}
            for name in references(tree):
                plan.fresh(name)
            met.append(tree)

        def clone(name: str) -> torch.Tensor:
            return plan.tensor(name).clone()

        def finish() -> None:
            seen: set[int] = set()
            for options, tree, live in zip(chosen, met, self.value.param_groups, strict=True):
                is_split = id(options) in seen  # two live groups must not come to share a tensor
                seen.add(id(options))
                new = graft(tree, clone if is_split else plan.tensor)
                live.update({name: update(live.get(name), value) for name, value in new.items()})

        plan.do(Phase.OPTIMIZER, finish)

    def _plan_shared(self, plan: Plan, shared: dict[Any, Any]) -> None:
        for name in references(shared):
            plan.fresh(name)

        def finish() -> None:
            state = self.value.state
            for name in [name for name in state if not isinstance(name, torch.Tensor) and name not in shared]:
                del state[name]
            state.update(graft(shared, plan.tensor))

        plan.do(Phase.OPTIMIZER, finish)

    def _settle(self) -> None:
        """Let the optimizer's own __setstate__ see the state, as `Optimizer.load_state_dict` does."""
        optimizer = self.value
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _named(index: int, group: dict[str, Any], names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for j, parameter in enumerate(group["params"]):
        yield names.get(id(parameter)) or f"group{index}.{j}", parameter


def _new(
    plan: Plan, saved_name: str, parameter: torch.Tensor, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Have a state tensor read that is not there yet; answers a function that makes it.

    State of a sharded parameter is sharded like it if it is as large. Optimizers make everything else from
    gradients that are DTensors, so that is one too, whole on every rank; but scalars are plain.
    """
    shape = plan.shape(saved_name)
    if not is_dtensor(parameter) or not shape:
        plan.fresh(saved_name, device)
        return lambda: plan.tensor(saved_name, device)
    if shape == tuple(parameter.shape):
        return plan.like(saved_name, parameter, saved_name)
    plan.fresh(saved_name, device)
    return lambda: replicated_like(plan.tensor(saved_name, device), parameter)


def _device(
    name: str, plan: Plan, saved_name: str, parameter: torch.Tensor, options: dict[str, Any]
) -> torch.device:
    """Where torch's optimizers want a state tensor: with its parameter, a step counter on the host."""
    is_counter = name == "step" and not plan.shape(saved_name)
    if is_counter and not (options.get("capturable") or options.get("fused")):
        return torch.device("cpu")
    return plan.place(parameter)


def _fits(live: Any, plan: Plan, saved_name: str, device: torch.device | None) -> bool:
    """True if a live tensor can take a saved one as it is."""
    return (
        isinstance(live, torch.Tensor)
        and not live.is_meta
        and tuple(live.shape) == plan.shape(saved_name)
        and live.dtype is plan.dtype(saved_name)
        and (device is None or live.device == device)
    )


def _claim(plan: Plan, label: str) -> Callable[[str, torch.Tensor], bool]:
    def claim(name: str, live: torch.Tensor) -> bool:
        if not _fits(live, plan, name, None):
            return False
        plan.fill(name, live, label)
        return True

    return claim
