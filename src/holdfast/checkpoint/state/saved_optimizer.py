"""Saved optimizer: state by parameter and options by group, merged from all parts of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.state.load import PARAMETER_MARK, Load
from holdfast.checkpoint.state.tree import references
from holdfast.errors import Corrupt, InvalidInput


@dataclass(frozen=True, slots=True)
class SavedState:
    """Saved state of one parameter: tensors by state key, other state as trees."""

    fqn: str
    tensors: dict[str, str]
    trees: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """A saved optimizer, as the source for the live one."""

    options: list[dict[str, Any] | None]  # by live group; None without a saved one
    states: dict[str, tuple[SavedState, bool]]
    """By live parameter: its state, and whether another one that it was tied to has it too."""
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
    states: dict[str, tuple[SavedState, bool]] = {}
    for fqn in (fqn for names in live for fqn in names):
        found = index.get(fqn)
        if found is None:
            plan.missing.append(f"{key}{PARAMETER_MARK}{fqn}")
            continue
        if found.fqn in taken:
            plan.notes.append(
                f"{key}{PARAMETER_MARK}{fqn}: it was tied to {found.fqn} when it was saved, and is not "
                "now; each has a copy of the saved value and optimizer state."
            )
        states[fqn] = found, found.fqn in taken
        taken.add(found.fqn)
    for fqn, saved in {saved.fqn: saved for saved in index.values()}.items():
        if fqn not in taken:
            plan.unexpected.append(f"{key}{PARAMETER_MARK}{fqn}")
            plan.used.update(saved.tensors.values(), references(saved.trees))
    plan.used.update(references(groups))
    return SavedOptimizer(_options(key, plan, groups, live), states, shared)


def _options(
    key: str, plan: Load, groups: list[dict[str, Any]], live: list[list[str]]
) -> list[dict[str, Any] | None]:
    """Return for each live group the options of a saved one with the same parameters, or with some."""
    primary = {plan.rename(alias): plan.rename(name) for alias, name in plan.tied.items()}
    held = [{primary.get(name, name) for name in map(plan.rename, group["params"])} for group in groups]
    found: list[dict[str, Any] | None] = []
    for index, fqns in enumerate(live):
        wanted = {primary.get(fqn, fqn) for fqn in fqns}
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
    prefix = f"{plan.saved_key(key)}.state."
    in_trees = set(references(state))
    for name in plan.saved_names.values():
        if name.startswith(prefix) and name not in in_trees:
            fqn, _, state_key = name[len(prefix) :].rpartition(".")
            if fqn in found and state_key.isidentifier():
                found[fqn].tensors[state_key] = name
    pairs = [*plan.tied.items(), *((name, alias) for alias, name in plan.tied.items())]
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
