"""Optimizers: state by the name of the parameter it belongs to, so that groups may be ordered otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch.optim import Optimizer

from holdfast.errors import InvalidInput
from holdfast.format.values import encode
from holdfast.state.capture import Sink
from holdfast.state.entry import Entry
from holdfast.state.load import PARAMETER_MARK, Phase, Plan
from holdfast.state.sharding import is_dtensor, replicated_like
from holdfast.state.slots import Slots, is_slot_name, survey
from holdfast.state.spread import Spread
from holdfast.state.table import Role
from holdfast.state.tree import graft, meet, references, strip, update

Names = Callable[[], dict[int, str]]


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


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a checkpoint has for one parameter: tensors by state key, other state as trees."""

    fqn: str
    tensors: dict[str, str]
    trees: dict[str, Any]


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
        values = _joined(self.key, list(plan.all_values(self.key)))
        saved = self._index(plan, values)
        groups = [list(_named(i, group, self._names())) for i, group in enumerate(self.value.param_groups)]
        chosen = [self._choose(plan, i, [fqn for fqn, _ in group], values) for i, group in enumerate(groups)]
        live_fqns = set()
        for options, group in zip(chosen, groups, strict=True):
            for fqn, parameter in group:
                live_fqns.add(saved[fqn].fqn if fqn in saved else fqn)
                if fqn in saved:
                    self._plan_state(plan, parameter, saved[fqn], options or {})
                else:
                    plan.missing.append(f"{self.key}.param_groups: {fqn}")
        self._skip(plan, {one.fqn: one for one in saved.values() if one.fqn not in live_fqns})
        for group in values["param_groups"]:
            plan.used.update(references(group))
        self._plan_groups(plan, chosen)
        self._plan_shared(plan, values.get("shared", {}))
        plan.do(Phase.OPTIMIZER, self._settle)

    def _index(self, plan: Plan, values: dict[str, Any]) -> dict[str, _Saved]:
        """What the checkpoint has for each parameter, by live name; a tied one stands under all its names."""
        found = {
            fqn: _Saved(fqn, {}, values["state"].get(fqn, {}))
            for group in values["param_groups"]
            for fqn in group["params"]
        }
        prefix = f"{plan.saved_key(self.key)}.state."
        for name in plan.saved_names.values():
            if name.startswith(prefix):
                fqn, _, state_key = name[len(prefix) :].rpartition(".")
                if fqn in found and state_key.isidentifier():
                    found[fqn].tensors[state_key] = name
        index = {plan.rename(alias): found[fqn] for alias, fqn in _aliases(plan) if fqn in found}
        return index | {plan.rename(fqn): one for fqn, one in found.items()}

    def _plan_state(
        self, plan: Plan, parameter: torch.Tensor, saved: _Saved, options: dict[str, Any]
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

    def _skip(self, plan: Plan, others: dict[str, _Saved]) -> None:
        """Report saved parameters that the live optimizer does not have, each once."""
        for fqn, saved in others.items():
            plan.unexpected.append(f"{self.key}{PARAMETER_MARK}{fqn}")
            plan.used.update(saved.tensors.values(), references(saved.trees))

    def _choose(
        self, plan: Plan, index: int, fqns: list[str], values: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Saved options for a live group: of the group with the same parameters, else of their old one."""
        primary = dict(_renamed_aliases(plan))
        wanted = {primary.get(fqn, fqn) for fqn in fqns}
        groups = values["param_groups"]
        renamed = [[plan.rename(fqn) for fqn in group["params"]] for group in groups]
        held = [{primary.get(fqn, fqn) for fqn in fqns} for fqns in renamed]
        if index < len(groups) and held[index] == wanted:
            return groups[index]
        for group, names in zip(groups, held, strict=True):
            if names == wanted:
                return group
        sources = [group for group, names in zip(groups, held, strict=True) if names & wanted]
        if not sources:
            return None
        if any(_options(group) != _options(sources[0]) for group in sources):
            message = (
                f"{self.key}.param_groups[{index}] has parameters of {len(sources)} saved groups with "
                "different options; it takes those of the first. Set what you want after the restore."
            )
            warnings.warn(message, UserWarning, stacklevel=2)
            plan.notes.append(message)
        return sources[0]

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


def _joined(key: str, parts: list[Any]) -> dict[str, Any]:
    """The saved values of an optimizer in all parts as one; where several know a parameter, the first counts.

    Raises:
        InvalidInput: it was not saved as a plain optimizer.
    """
    for values in parts:
        _check_saved(key, values)
    groups = [group for values in parts for group in values["param_groups"]]
    state: dict[str, Any] = {}
    shared: dict[Any, Any] = {}
    for values in reversed(parts):
        state.update(values["state"])
        shared.update(values.get("shared", {}))
    return {"param_groups": groups, "state": state, "shared": shared}


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


def _check_saved(key: str, values: Any) -> None:
    groups = values.get("param_groups") if isinstance(values, dict) else None
    if isinstance(groups, list) and all(type(f) is str for group in groups for f in group.get("params", [0])):
        return
    message = (
        f"{key} was not saved as a plain optimizer, but as another kind of object or as an optimizer with "
        "its own state_dict() or state_dict hooks. Nothing was changed. Restore it into the same kind."
    )
    raise InvalidInput(message, key=key)


def _aliases(plan: Plan) -> Iterator[tuple[str, str]]:
    """Pairs of saved names of one tensor, of which the second may be an optimizer's parameter."""
    for alias, name in plan.tied.items():
        yield alias, name
        yield name, alias


def _renamed_aliases(plan: Plan) -> Iterator[tuple[str, str]]:
    for alias, name in plan.tied.items():
        yield plan.rename(alias), plan.rename(name)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


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
