"""Optimizers, live and saved: state by the name of its parameter, so that the order of groups may differ."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from copy import deepcopy
from itertools import chain, compress
from typing import Any, final

import torch
from msgspec import Struct
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from typing_extensions import override

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.state.entry import Replication, StateEntry
from holdfast.checkpoint.state.fitting import Fitting
from holdfast.checkpoint.state.load import PARAMETER_MARK, Load, LoadPhase, Maker, plan_state
from holdfast.checkpoint.state.sharding import is_divided, replicated_like, shape_of
from holdfast.checkpoint.state.tensor_table import Role, TensorTable
from holdfast.checkpoint.state.tensors import PLAIN, is_composite, is_dtensor, laid_out_like
from holdfast.checkpoint.state.tree import PLAIN_TYPES, has_saved_form, is_plain_value, references
from holdfast.errors import Corrupt, InvalidInput

_get_values = operator.methodcaller("values")


class OptimizerLayout(Struct, frozen=True):
    """Positions and names of the values in an optimizer's state, valid while `facts` stay the same."""

    facts: tuple[Any, ...] | None  # see `_facts`; a layout without them is used once
    alive: tuple[Any, ...]  # objects whose ids are in the facts
    order: list[int]  # indices of the states in the order of the groups, the same on all ranks
    is_tensor: list[bool]  # of each value in this order
    leaves: list[tuple[int, str, Any, Role]]  # the others: index, name of the parameter, state key, role
    fqns: list[list[str]]  # names of the parameters of each group
    names: list[str]  # of the tensors
    roles: list[Role]


def _facts(optimizer: Optimizer, parameter_names: dict[int, str]) -> tuple[Any, ...] | None:
    """Return the facts that a layout depends on: identities, and types of state; None without dicts."""
    states = optimizer.state.values()
    if not {dict}.issuperset(map(type, states)):
        return None
    parameters_of = [list(map(id, group["params"])) for group in optimizer.param_groups]
    types = list(map(type, chain.from_iterable(map(_get_values, states))))
    return id(parameter_names), parameters_of, list(map(id, optimizer.state)), list(map(list, states)), types


def is_state_tensor_name(key: Any) -> bool:
    """Return True if tensors under this state key are saved under that name."""
    return type(key) is str and key.isidentifier()


Names = Callable[[], dict[int, str]]
_HOOKED_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
"""Code of the function that torch wraps around every step() to run its hooks."""


_SAVE_AND_LOAD_HOOKS = (
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def is_plain(optimizer: Optimizer) -> bool:
    """Return True if an optimizer saves and loads as `torch.optim.Optimizer` does."""
    kind, own = type(optimizer), optimizer.__dict__
    return (
        kind.state_dict is Optimizer.state_dict
        and kind.load_state_dict is Optimizer.load_state_dict
        and own.keys().isdisjoint(("state_dict", "load_state_dict"))
        and not any(getattr(optimizer, hooks, None) for hooks in _SAVE_AND_LOAD_HOOKS)
    )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return True if `register_step_pre_hook` works. Some wrappers skip the base constructor."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "param_groups")


def stepping() -> str | None:
    """Return the class of the optimizer whose step() this thread runs; None also in the hooks after it."""
    inner, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _HOOKED_STEP and inner is not None:
            optimizer = frame.f_locals["args"][0]
            if inner.f_code not in _codes_after_step(optimizer):
                return type(optimizer).__qualname__
        inner, frame = frame, frame.f_back
    return None


def _codes_after_step(optimizer: Optimizer) -> set[object]:
    """Return the code objects of the hooks that run after an optimizer's step."""
    hooks = [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    hooks = [hook.func if isinstance(hook, functools.partial) else hook for hook in hooks]
    bodies = [h if hasattr(h, "__code__") else getattr(h, "__func__", type(h).__call__) for h in hooks]
    return {getattr(body, "__code__", None) for body in bodies}


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer and the tensors of its state."""
    return [*parameters(optimizer), *state_tensors(optimizer)]


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


class SavedState(Struct, frozen=True):
    """Saved state of one parameter: tensors by state key, other state as trees."""

    fqn: str
    tensors: dict[str, str]
    trees: dict[str, Any]


class SavedOptimizer(Struct, frozen=True):
    """A saved optimizer, as the source for the live one."""

    options: list[dict[str, Any] | None]  # by live group; None without a saved one
    states: dict[str, SavedState]  # by live parameter
    copied: set[str]  # live parameters that were tied to another one when they were saved, and are not now
    shared: dict[Any, Any]  # state that is of no parameter


def find_saved(key: str, plan: Load, live: list[list[str]]) -> SavedOptimizer:
    """Return the saved optimizer for the live groups of parameters, and record all differences."""
    parts = list(plan.all_values(key))
    for values in parts:
        _check_saved(key, values)
    groups = [group for values in parts for group in values["param_groups"]]
    state: dict[str, Any] = {}
    shared: dict[Any, Any] = {}
    for values in reversed(parts):  # the first part with a parameter wins
        state |= values["state"]
        shared |= values.get("shared", {})
    index = _index(key, plan, groups, state)
    taken: set[str] = set()
    states: dict[str, SavedState] = {}
    copied: set[str] = set()
    for fqn in chain.from_iterable(live):
        found = index.get(fqn)
        if found is None:
            plan.missing.append(f"{key}{PARAMETER_MARK}{fqn}")
            continue
        if found.fqn in taken:
            plan.notes.append(
                f"{key}{PARAMETER_MARK}{fqn}: it was tied to {found.fqn} when it was saved, and is not "
                "now; each has a copy of the saved value and optimizer state."
            )
            copied.add(fqn)
        states[fqn] = found
        taken.add(found.fqn)
    for fqn, saved in {saved.fqn: saved for saved in index.values()}.items():
        if fqn not in taken:
            plan.unexpected.append(f"{key}{PARAMETER_MARK}{fqn}")
            plan.used.update(saved.tensors.values(), references(saved.trees))
    plan.used.update(references(groups))
    return SavedOptimizer(_options(key, plan, groups, live), states, copied, shared)


def _options(
    key: str, plan: Load, groups: list[dict[str, Any]], live: list[list[str]]
) -> list[dict[str, Any] | None]:
    """Return for each live group the options of a saved one with the same parameters, or with some."""
    primary = {plan.rename(alias): plan.rename(name) for alias, name in plan.tied.items()}
    renamed = [list(map(plan.rename, group["params"])) for group in groups]
    held = [set(map(primary.get, names, names)) for names in renamed]
    found: list[dict[str, Any] | None] = []
    for index, fqns in enumerate(live):
        wanted = set(map(primary.get, fqns, fqns))
        same = [i for i, names in enumerate(held) if names == wanted]
        sources = [groups[i] for i, names in enumerate(held) if names & wanted]
        if same:
            found.append(groups[index if index in same else same[0]])
            continue
        found.append(sources[0] if sources else None)
        if any(options_of(group) != options_of(sources[0]) for group in sources):
            plan.notes.append(
                f"{key}.param_groups[{index}] has parameters of {len(sources)} saved groups with "
                "different options. It uses those of the first. Set the options after the restore if needed."
            )
    return found


def _index(
    key: str, plan: Load, groups: list[dict[str, Any]], state: dict[str, Any]
) -> dict[str, SavedState]:
    """Return the saved state of each parameter by live name. Tied ones appear several times."""
    found = {fqn: SavedState(fqn, {}, state.get(fqn, {})) for group in groups for fqn in group["params"]}
    prefix = f"{plan.keys.get(key)}.state."
    in_trees = set(references(state))
    for name in plan.saved_names.values():
        if name.startswith(prefix) and name not in in_trees:
            fqn, _, state_key = name[len(prefix) :].rpartition(".")
            if fqn in found and state_key.isidentifier():
                found[fqn].tensors[state_key] = name
    pairs = [*plan.tied.items(), *zip(plan.tied.values(), plan.tied, strict=True)]
    index = {plan.rename(alias): found[fqn] for alias, fqn in pairs if fqn in found}
    return index | {plan.rename(fqn): one for fqn, one in found.items()}


def _check_saved(key: str, values: Any) -> None:
    groups = values.get("param_groups") if isinstance(values, dict) else None
    if not isinstance(groups, list) or not all(map(_has_names, groups)):
        raise InvalidInput(
            f"{key} was not saved as a plain optimizer, but as another kind of object, or as an optimizer "
            "with its own state_dict() or state_dict hooks. Nothing was changed. Restore it into the same "
            "kind.",
            key=key,
        )
    state, shared = values.get("state"), values.get("shared", {})
    found = [state, shared, *(state.values() if isinstance(state, dict) else ())]
    if not all(isinstance(one, dict) for one in found):
        raise Corrupt(f"{key}: the saved state of an optimizer is damaged.", key=key)


def _has_names(group: Any) -> bool:
    """Return True for a group of parameters by name, as plain optimizers are saved."""
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and {str}.issuperset(map(type, params))


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without the names of its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


@final
class OptimizerEntry(StateEntry):
    """An optimizer without save and load code of its own; `names` returns those of live parameters by id.

    State keeps its saved dtype: `Optimizer.load_state_dict` would cast it to the dtype of its parameter,
    which rounds float32 moments of bfloat16 parameters.
    """

    is_filled = True

    def __init__(self, key: str, value: Optimizer, replication: Replication | None, names: Names) -> None:
        super().__init__(key, value, replication)
        self._names = names
        self._layout: OptimizerLayout | None = None

    @override
    def capture(self, table: TensorTable) -> Any:
        optimizer, names = self.value, table.parameter_names
        facts, layout = _facts(optimizer, names), self._layout
        if layout is None or facts is None or layout.facts != facts:
            layout = self._layout = self._find_layout(table, _names_of(optimizer, names), facts)
        states = list(optimizer.state.values())
        values = list(chain.from_iterable(states[i].values() for i in layout.order))
        tensors = values if not layout.leaves else list(compress(values, layout.is_tensor))
        if not table.collect_all(layout.names, layout.roles, tensors):
            self._layout = None  # one has become a composite tensor, which its type does not show
            return self.capture(table)
        groups = capture_groups(self, optimizer.param_groups, layout.fqns, table, named_types=True)
        others: dict[str, Any] = {}
        for i, fqn, key, role in layout.leaves:
            value = values[i]
            if type(value) not in PLAIN_TYPES:
                # The description of a composite tensor may have types of the program.
                options = {"named_types": isinstance(value, torch.Tensor)}
                value = table.extract(value, f"{self.key}.state.{fqn}.{key}", role, **options)
            others.setdefault(fqn, {})[key] = value
        found = {"param_groups": groups, "state": encode(others, f"{self.key}.state")}
        if len(states) > len(layout.order) and (shared := self._extract_shared(table)):
            found["shared"] = encode(shared, f"{self.key}.state")
        return found

    def _find_layout(
        self, table: TensorTable, fqns: list[list[str]], facts: tuple[Any, ...] | None
    ) -> OptimizerLayout:
        state = self.value.state
        place = {id(owner): i for i, owner in enumerate(state)}
        named = zip(chain.from_iterable(fqns), parameters(self.value), strict=True)
        pairs = [(fqn, one) for fqn, one in named if id(one) in place and state[one]]
        roles = {fqn: self._role(table, fqn, parameter) for fqn, parameter in pairs}
        rows = [(fqn, key, value) for fqn, parameter in pairs for key, value in state[parameter].items()]
        is_tensor = [
            isinstance(value, torch.Tensor) and is_state_tensor_name(key) and not is_composite(value)
            for _, key, value in rows
        ]
        tensors = list(compress(rows, is_tensor))
        return OptimizerLayout(
            facts=facts,
            alive=(table.parameter_names, parameters(self.value), list(state)),
            order=[place[id(parameter)] for _, parameter in pairs],
            is_tensor=is_tensor,
            leaves=[(i, fqn, key, roles[fqn]) for i, (fqn, key, _) in enumerate(rows) if not is_tensor[i]],
            fqns=fqns,
            names=[f"{self.key}.state.{fqn}.{key}" for fqn, key, _ in tensors],
            roles=[roles[fqn] for fqn, _, _ in tensors],
        )

    def _extract_shared(self, table: TensorTable) -> dict[Any, Any]:
        """Return the state that is of no parameter."""
        role = Role(self.replication or Replication.REPLICATED, is_owned=True)
        return {
            name: table.extract(value, f"{self.key}.shared.{name}", role, composites=False)
            for name, value in self.value.state.items()
            if not isinstance(name, torch.Tensor)
        }

    def _role(self, table: TensorTable, fqn: str, parameter: torch.Tensor) -> Role:
        """Return the role of state. It is replicated as its parameter, unless that is outside the state."""
        is_own = table.is_per_rank(fqn)
        of_parameter = Replication.PER_RANK if is_own else Replication.REPLICATED
        is_in_state = id(parameter) in table.parameter_names
        replication = self.replication or (of_parameter if is_in_state else Replication.OWN)
        follows = fqn if replication is Replication.REPLICATED and is_in_state else None
        return Role(replication, is_owned=True, follows=follows)

    @override
    def plan(self, plan: Load) -> None:
        if plan.lacks(self.key):
            return
        optimizer: Optimizer = self.value
        names = _names_of(optimizer, self._names())
        saved = find_saved(self.key, plan, names)
        made: list[tuple[torch.Tensor, Callable[[], dict[Any, Any]]]] = []
        for options, fqns, group in zip(saved.options, names, optimizer.param_groups, strict=True):
            for fqn, parameter in zip(fqns, group["params"], strict=True):
                if (state := saved.states.get(fqn)) is not None:
                    is_copied = fqn in saved.copied
                    make = self._plan_state(plan, parameter, state, is_copied, options or {})
                    made.append((parameter, make))
        set_options = self._plan_options(plan, saved.options)
        make_shared = plan.read_tree(saved.shared)

        def finish() -> None:
            for parameter, make in made:
                if state := make():
                    optimizer.state[parameter] = state
                else:
                    optimizer.state.pop(parameter, None)
            set_options()
            for name in list(optimizer.state):
                if not isinstance(name, torch.Tensor) and name not in saved.shared:
                    del optimizer.state[name]
            optimizer.state.update(make_shared())
            # All of the state is there now, and passed on as `Optimizer.load_state_dict` does.
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

        plan.add_step(LoadPhase.OPTIMIZER, finish)

    def _plan_state(
        self, plan: Load, parameter: torch.Tensor, saved: SavedState, is_copied: bool, options: dict[str, Any]
    ) -> Callable[[], dict[Any, Any]]:
        """Plan to read the state of a parameter; return a function that returns it, perhaps a copy."""
        live: dict[Any, Any] = self.value.state.get(parameter, {})
        device = plan.device_of(parameter)
        kept: dict[str, torch.Tensor] = {}
        made: dict[str, Maker] = {}
        for name, saved_name in saved.tensors.items():
            is_counter = name == "step" and not plan.shape(saved_name)
            is_on_host = is_counter and not (options.get("capturable") or options.get("fused"))
            place = torch.device("cpu") if is_on_host else device
            if _fits(live.get(name), plan, saved_name, place if name == "step" else None):
                kept[name] = live[name]
                plan.fill(saved_name, live[name], saved_name)
            else:
                made[name] = _new(plan, saved_name, parameter, place)
        trees: dict[str, Any] = {}
        for name, tree in saved.trees.items():
            label = f"{self.key}.state.{saved.fqn}.{name}"
            if isinstance(tree, SavedTensor):
                made[name] = plan_state(plan, self.value, parameter, tree, live.get(name), label)
            elif not has_saved_form(tree):
                trees[name] = tree
            elif (found := plan.fit(tree, live.get(name), label)) is not None:
                trees[name] = found.tree
        make_trees = plan.read_tree(trees, device)

        def make() -> dict[Any, Any]:
            found = make_trees()
            found |= {name: make() for name, make in made.items()}
            ordered = {name: found[name] for name in (*saved.tensors, *saved.trees) if name in found}
            return kept | (deepcopy(ordered) if is_copied else ordered)

        return make

    def _plan_options(self, plan: Load, chosen: list[dict[str, Any] | None]) -> Callable[[], None]:
        """Plan to read the options of all groups; return a function that sets them."""
        rows: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
        for i, options in enumerate(chosen):
            live, label = self.value.param_groups[i], f"{self.key}.param_groups.{i}"
            found: dict[str, Any] = {}
            made: dict[str, Maker] = {}
            for name, value in options_of(options or {}).items():
                if is_plain_value(value) and is_plain_value(live.get(name)):
                    found[name] = value  # as most options, which need no walk
                elif (fitted := plan.fit(value, live.get(name), f"{label}.{name}")) is not None:
                    found[name] = fitted.tree
                    made |= _fill(plan, fitted, label)
            make = plan.read_tree(found, made=made)
            if any(options is one for one in chosen[:i]):  # two live groups must not share a tensor
                copies = {name: lambda name=name: plan.tensor(name).clone() for name in references(found)}
                make = plan.read_tree(found, made=copies | made)
            rows.append((live, make))

        def set_options() -> None:
            for live, make in rows:
                for name, value in make().items():
                    is_plain = is_plain_value(value)
                    live[name] = value if is_plain else plan.updates.update(live.get(name), value)

        return set_options


def capture_groups(
    entry: StateEntry,
    groups: list[dict[str, Any]],
    fqns: list[list[str]],
    table: TensorTable,
    **options: bool,
) -> list[dict[str, Any]]:
    """Return the encoded groups of an optimizer, with names in place of their parameters.

    `options` are those of `Extraction`.
    """
    role, found = Role(entry.replication or Replication.REPLICATED), []
    for i, (group, names) in enumerate(zip(groups, fqns, strict=True)):
        others = {name: value for name, value in group.items() if name != "params"}
        tree = table.extract(others, f"{entry.key}.param_groups.{i}", role, **options)
        # A copy of the names: a captured state must not change with the names kept here.
        found.append({"params": list(names), **encode(tree, f"{entry.key}.param_groups[{i}]")})
    return found


def _names_of(optimizer: Optimizer, names: dict[int, str]) -> list[list[str]]:
    """Return the names of the parameters of each group."""
    return [
        [names.get(id(one)) or f"group{i}.{j}" for j, one in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def _new(plan: Load, saved_name: str, parameter: torch.Tensor, device: torch.device) -> Maker:
    """Plan to read a state tensor that the live optimizer lacks; return a function that makes it."""
    # State of a sharded parameter is sharded like it if it has the same shape. Optimizers make all other
    # state from gradients that are DTensors, so it is a DTensor too, whole on every rank; scalars are plain.
    shape = plan.shape(saved_name)
    if is_divided(parameter) and shape and shape == shape_of(parameter):
        return plan.read_like(saved_name, parameter, saved_name)
    plan.read(saved_name, device)
    if is_dtensor(parameter) and shape:
        return lambda: replicated_like(plan.tensor(saved_name, device), parameter)
    if type(parameter) in PLAIN:
        return lambda: laid_out_like(plan.tensor(saved_name, device), parameter)
    return lambda: plan.tensor(saved_name, device)


def _fits(live: Any, plan: Load, saved_name: str, device: torch.device | None) -> bool:
    """Return True if a live tensor can be filled from a saved one directly."""
    return (
        isinstance(live, torch.Tensor)
        and not is_composite(live)
        and not live.is_meta
        and tuple(live.shape) == plan.shape(saved_name)
        and live.dtype is plan.dtype(saved_name)
        and (device is None or live.device == device)
    )


def _fill(plan: Load, fitting: Fitting, label: str) -> dict[str, Maker]:
    """Plan to fill the live tensors of a fitted tree that can be; return functions that return them."""
    live = {name: tensor for name, tensor, _ in fitting.places if _fits(tensor, plan, name, None)}
    for name, tensor in live.items():
        plan.fill(name, tensor, label)
    return {name: lambda tensor=tensor: tensor for name, tensor in live.items()}
