"""Content of a checkpoint as new tensors and values, without live objects to fill."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

from holdfast.format.nesting import insert, is_under
from holdfast.format.plain_forms import place_entries, placed_composites
from holdfast.state.load import LoadPhase, LoadPlan
from holdfast.state.tree import insert_tensors, references


def plan_new(plan: LoadPlan, target: MutableMapping[str, Any], keys: Collection[str]) -> None:
    """Plan to put the saved values of some keys into a mapping.

    Their tensors are whole, and in new memory.

    Args:
        plan: receives the tensors to read, and the step that fills `target`.
        target: receives the values. Nothing in it is changed before all tensors are filled.
        keys: top-level keys that the checkpoint has.
    """
    trees = {key: plan.values(key) for key in keys}
    referenced = [name for tree in trees.values() for name in references(tree)]
    implied = _implied(plan, keys, set(referenced))
    for name in (*referenced, *implied):
        plan.read_new(name)

    def finish() -> None:
        new = {key: _placed(insert_tensors(tree, plan.tensor, is_live=False)) for key, tree in trees.items()}
        for name in implied:
            insert(new, name, plan.tensor(name))
        target.update(place_entries(new))

    plan.add_step(LoadPhase.VALUE, finish)


def _placed(value: Any) -> Any:
    return placed_composites(value) if type(value) is dict else value


def _implied(plan: LoadPlan, keys: Collection[str], referenced: Collection[str]) -> list[str]:
    """Return the tensors that no value refers to: those of modules and optimizers."""
    return [
        name
        for name in plan.saved_names
        if name not in referenced and any(is_under(name, key) for key in keys)
    ]
