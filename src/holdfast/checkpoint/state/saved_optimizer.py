"""Saved optimizer: state by parameter and options by group, merged from all parts of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from holdfast.checkpoint.state.load import PARAMETER_MARK, Load
from holdfast.checkpoint.state.tree import references
from holdfast.errors import Corrupt, InvalidInput


@dataclass(frozen=True, slots=True)
class SavedState:
    """Saved state of one parameter: tensors by state key, other state as trees."""

    fqn: str
    tensors: dict[str, str]
    trees: dict[str, Any]


@final
class SavedOptimizer:
    """A saved optimizer, as the source for the live one under a key."""

    def __init__(self, key: str, plan: Load) -> None:
        self._key = key
        self._plan = plan
        values = _joined(key, list(plan.all_values(key)))
        self._groups: list[dict[str, Any]] = values["param_groups"]
        self.shared: dict[Any, Any] = values["shared"]
        self._states = self._index(values["state"])
        self._taken: set[str] = set()
        for group in self._groups:
            plan.used.update(references(group))

    def state_of(self, fqn: str) -> tuple[SavedState | None, bool]:
        """Return the state of a live parameter, and whether another one that it was tied to has it too."""
        found = self._states.get(fqn)
        if found is None:
            self._plan.missing.append(f"{self._key}{PARAMETER_MARK}{fqn}")
            return None, False
        is_shared = found.fqn in self._taken
        if is_shared:
            self._plan.notes.append(
                f"{self._key}{PARAMETER_MARK}{fqn}: it was tied to {found.fqn} when it was saved, and is not "
                "now; each has a copy of the saved value and optimizer state."
            )
        self._taken.add(found.fqn)
        return found, is_shared

    def skip_the_rest(self) -> None:
        """Record saved parameters that no live one uses as unexpected, each once."""
        for saved in {one.fqn: one for one in self._states.values()}.values():
            if saved.fqn not in self._taken:
                self._plan.unexpected.append(f"{self._key}{PARAMETER_MARK}{saved.fqn}")
                self._plan.used.update(saved.tensors.values(), references(saved.trees))

    def choose(self, index: int, fqns: list[str]) -> dict[str, Any] | None:
        """Return the saved options of the group with the same parameters, or of one that had some of them."""
        plan, groups = self._plan, self._groups
        primary = {plan.rename(alias): plan.rename(name) for alias, name in plan.tied.items()}
        wanted = set(map(primary.get, fqns, fqns))
        renamed = [list(map(plan.rename, group["params"])) for group in groups]
        held = [set(map(primary.get, names, names)) for names in renamed]
        if index < len(groups) and held[index] == wanted:
            return groups[index]
        for group, names in zip(groups, held, strict=True):
            if names == wanted:
                return group
        sources = [group for group, names in zip(groups, held, strict=True) if names & wanted]
        if not sources:
            return None
        if any(options_of(group) != options_of(sources[0]) for group in sources):
            plan.notes.append(
                f"{self._key}.param_groups[{index}] has parameters of {len(sources)} saved groups with "
                "different options. It uses those of the first. Set the options after the restore if needed."
            )
        return sources[0]

    def _index(self, state: dict[str, Any]) -> dict[str, SavedState]:
        """Return the saved state of each parameter by live name. Tied ones appear several times."""
        plan = self._plan
        fqns = [fqn for group in self._groups for fqn in group["params"]]
        found = {fqn: SavedState(fqn, {}, state.get(fqn, {})) for fqn in fqns}
        prefix = f"{plan.saved_key(self._key)}.state."
        in_trees = set(references(state))
        for name in plan.saved_names.values():
            if name.startswith(prefix) and name not in in_trees:
                fqn, _, state_key = name[len(prefix) :].rpartition(".")
                if fqn in found and state_key.isidentifier():
                    found[fqn].tensors[state_key] = name
        pairs = [*plan.tied.items(), *((name, alias) for alias, name in plan.tied.items())]
        index = {plan.rename(alias): found[fqn] for alias, fqn in pairs if fqn in found}
        return index | {plan.rename(fqn): one for fqn, one in found.items()}


def _joined(key: str, parts: list[Any]) -> dict[str, Any]:
    """Return an optimizer's saved values of all parts as one. The first part with a parameter wins."""
    for values in parts:
        _check_saved(key, values)
    groups = [group for values in parts for group in values["param_groups"]]
    state: dict[str, Any] = {}
    shared: dict[Any, Any] = {}
    for values in reversed(parts):
        state.update(values["state"])
        shared.update(values.get("shared", {}))
    return {"param_groups": groups, "state": state, "shared": shared}


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
