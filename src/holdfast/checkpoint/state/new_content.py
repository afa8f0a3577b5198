"""Content of a checkpoint as new tensors and values, without live objects to fill."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, MutableMapping
from typing import Any

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.format.named_types import NAMED_TYPES
from holdfast.checkpoint.format.nesting import insert, is_under, place_entries, placed_composites
from holdfast.checkpoint.state.load import Load, LoadPhase
from holdfast.checkpoint.state.tree import insert_tensors, references
from holdfast.errors import ResumeWarning
from holdfast.system import units
from holdfast.system.callsite import warn


def plan_new(plan: Load, target: MutableMapping[str, Any], keys: Collection[str]) -> None:
    """Plan to put the saved values of some keys into a mapping, with whole tensors in new memory.

    Nothing in the mapping is changed before all tensors are filled.
    """
    trees = {key: plan.values(key) for key in keys}
    referenced = [name for tree in trees.values() for name in references(tree)]
    known = set(referenced)  # modules and optimizers have tensors that no value refers to
    others = [name for name in plan.saved_names if name not in known]
    implied = [name for name in others if any(is_under(name, key) for key in keys)]
    for name in (*referenced, *implied):
        plan.read_new(name)

    _warn_of_types([found for key, tree in trees.items() for found in _named(tree, key)])

    def finish() -> None:
        new = {key: insert_tensors(tree, plan.tensor, is_live=False) for key, tree in trees.items()}
        new = {key: placed_composites(one) if type(one) is dict else one for key, one in new.items()}
        for name in implied:
            insert(new, name, plan.tensor(name))
        target.update(place_entries(new))

    plan.add_step(LoadPhase.VALUE, finish)


def _warn_of_types(named: list[tuple[str, str]]) -> None:
    """Warn that values come back as other types than they were saved with."""
    if not named:
        return
    path, kind = named[0]
    others = "" if len(named) == 1 else f", and {units.plural(len(named) - 1, 'other value')} likewise"
    warn(
        f"{path} was saved as {kind}{others}. A checkpoint only names types, so load() returns the content "
        "without them: SavedEnum, SavedDataclass or SavedNamedTuple objects, and a defaultdict without its "
        "factory. Pass load(into=...) with a value of the type in its place, or save a plain value there.",
        ResumeWarning,
    )


def _named(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and type of each value whose type is only named."""
    if isinstance(tree, NAMED_TYPES):
        yield path, f"a {tree.type.replace(':', '.')}"
    elif type(tree) is collections.defaultdict:
        yield path, "a collections.defaultdict"
    elif (kind := kind_of(tree)) is not None and not isinstance(tree, SavedTensor):
        keys = tree if isinstance(tree, dict) else ()
        yield from (one for key in keys for one in _named(key, f"{path}.<key>"))
        for step, item in kind.items(tree):
            yield from _named(item, f"{path}.{step}")
