"""Layout of an optimizer's state: the positions of its tensors, valid while its structure is unchanged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.state.composites import is_composite
from holdfast.checkpoint.state.tensor_table import Role

_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_get_values = operator.methodcaller("values")


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """Positions of the tensors and plain values in an optimizer's state.

    Made by `find_layout`; `read` returns the current values.
    """

    parameter_names: dict[int, str]  # of the state at that time; compared by identity
    parameters: list[torch.Tensor]
    group_sizes: list[int]
    owners: list[torch.Tensor]  # parameters with state, in the order of the optimizer's state
    order: list[int]  # indices of `owners` in the order of the groups, the same on all ranks
    keys: list[list[Any]]  # state keys of each of `owners`, in the order of the groups
    types: list[type]  # of all values, in the order of the groups
    is_tensor: list[bool]  # of each of these
    leaves: list[tuple[int, str, Any]]  # of the others: index, name of the parameter, state key
    fqns: list[list[str]]  # names of the parameters of each group
    names: list[str]  # of the tensors
    roles: list[Role]

    def read(self, optimizer: Optimizer, parameter_names: dict[int, str]) -> list[Any] | None:
        """Return the values of an optimizer's state in order, or None if the layout changed."""
        groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        if (
            self.parameter_names is not parameter_names
            or list(map(len, groups)) != self.group_sizes
            or len(state) != len(self.owners)
            # Identity, since tensors that are equal are not one and the same.
            or not all(map(operator.is_, chain.from_iterable(groups), self.parameters))
            or not all(map(operator.is_, state, self.owners))
        ):
            return None
        found = list(state.values())
        ordered = [found[i] for i in self.order]
        if list(map(list, ordered)) != self.keys:
            return None
        values = list(chain.from_iterable(map(_get_values, ordered)))
        return values if list(map(type, values)) == self.types else None

    def tensors(self, values: list[Any]) -> list[torch.Tensor]:
        """Return the tensors among the values from `read`, in the order of `names`."""
        return values if not self.leaves else list(compress(values, self.is_tensor))

    def others(self, values: list[Any]) -> dict[str, Any]:
        """Return the plain values among those from `read`, by parameter and state key."""
        others: dict[str, Any] = {}
        for i, fqn, key in self.leaves:
            others.setdefault(fqn, {})[key] = values[i]
        return others


def find_layout(
    optimizer: Optimizer,
    parameter_names: dict[int, str],
    named: Sequence[Sequence[tuple[str, torch.Tensor]]],
    prefix: str,
    role: Callable[[str, torch.Tensor], Role],
) -> OptimizerLayout | None:
    """Return the layout of an optimizer's state, or None if it contains other objects.

    Args:
        parameter_names: names of the state's parameters by id.
        named: the optimizer's parameters with their names, group by group.
        prefix: of the names of all tensors.
        role: returns the role of the state tensors of a parameter.

    Returns:
        The layout, or None unless the state consists of plain values and tensors that are not composite.
    """
    state = optimizer.state
    place = {id(owner): i for i, owner in enumerate(state)}
    pairs = [(fqn, parameter) for group in named for fqn, parameter in group if id(parameter) in place]
    if len(pairs) != len(state) or not all(type(state[parameter]) is dict for _, parameter in pairs):
        return None  # state that is shared, or of parameters outside of all groups
    rows = [(fqn, p, key, value) for fqn, p in pairs for key, value in state[p].items()]
    is_tensor = [isinstance(v, torch.Tensor) and is_state_tensor_name(key) for _, _, key, v in rows]
    if not all(flag or type(row[3]) in _LEAVES for flag, row in zip(is_tensor, rows, strict=True)):
        return None
    tensors = list(compress(rows, is_tensor))
    if any(is_composite(value) for *_, value in tensors):
        return None
    return OptimizerLayout(
        parameter_names=parameter_names,
        parameters=[parameter for group in named for _, parameter in group],
        group_sizes=[len(group) for group in named],
        owners=list(state),
        order=[place[id(parameter)] for _, parameter in pairs],
        keys=[list(state[parameter]) for _, parameter in pairs],
        types=[type(value) for *_, value in rows],
        is_tensor=is_tensor,
        leaves=[(i, fqn, key) for i, (fqn, _, key, _) in enumerate(rows) if not is_tensor[i]],
        fqns=[[fqn for fqn, _ in group] for group in named],
        names=[f"{prefix}{fqn}.{key}" for fqn, _, key, _ in tensors],
        roles=[role(fqn, parameter) for fqn, parameter, _, _ in tensors],
    )


def is_state_tensor_name(key: Any) -> bool:
    """Return True if tensors under this state key are saved under that name."""
    return type(key) is str and key.isidentifier()
