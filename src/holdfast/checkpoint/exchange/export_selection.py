"""Part of a checkpoint that is exported: tensors by name, their bytes in order, and the values."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.checkpoint.exchange.trees import select, touched_by
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.format.nesting import is_optimizer
from holdfast.checkpoint.restore.checkpoint import Checkpoint


class ExportSelection:
    """Checkpoint as one rank sees it, with what only other ranks have, or a part of it.

    Args:
        only: prefixes of the tensors and values to select; None for all.
        rename: new prefix by old prefix; "" removes a prefix.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        rank: int = 0,
        only: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
        num_threads: int = 4,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.checkpoint, self.rank, self.num_threads, self.on_bytes = checkpoint, rank, num_threads, on_bytes
        self.only = None if only is None else tuple(only)
        self.rename = dict(rename or {})
        self.num_bytes = 0  # of tensors that have been read so far
        self._rank_of: dict[str, int] = {}  # of tensors that only other ranks have
        self._first_of: dict[str, str] = {}  # first selected alias of other names
        shapes, others = checkpoint.facts(rank), [of for of in range(checkpoint.world_size) if of != rank]
        # Without an index every rank has values of its own; with one the ranks have divided them.
        ranks = (rank, *others) if checkpoint.value_index() is None else (rank,)
        self.every_value = _join(checkpoint.values(of) for of in ranks)  # also what only other ranks have
        if not shapes.keys() >= checkpoint.manifest.tensors.keys():
            for of in others:
                found = {name: facts for name, facts in checkpoint.facts(of).items() if name not in shapes}
                shapes |= found
                self._rank_of |= dict.fromkeys(found, of)
        names = [*shapes, *(key for key in self.every_value if key not in shapes)]
        chosen = select(names, self.only, f"Step {checkpoint.step}")
        self.tensors = {name: Shard.whole(name, *shapes[name]) for name in chosen if name in shapes}
        for name in self.tensors:
            self.original(name)  # in this order, so that the first alias does not depend on later calls

    def original(self, name: str) -> str:
        """Return the first selected name that is tied to `name`, whose bytes it shares."""
        root = self.checkpoint.info(name).tied_to or name
        if root in self.tensors:
            return root
        return self._first_of.setdefault(root, name)

    def rank_of(self, name: str) -> int:
        """Return the rank whose copy of a tensor is exported."""
        return self._rank_of.get(name, self.rank)

    def values(self) -> dict[str, Any]:
        """Return the selected values by top-level key, with a `TensorRef` in place of each tensor."""
        if self.only is None:
            return self.every_value
        return touched_by(self.only, self.every_value)

    def count(self, num_bytes: int) -> None:
        """Count bytes of tensors that have been read."""
        self.num_bytes += num_bytes
        if self.on_bytes is not None:
            self.on_bytes(num_bytes)

    def stream(self, names: Sequence[str]) -> Callable[[int], Iterator[memoryview]]:
        """Return a function that yields the bytes of the next of some tensors, given their number.

        A view is valid until the next one.
        """
        filled = [name for name in names if self.tensors[name].num_bytes]
        slices = itertools.chain.from_iterable(
            self.checkpoint.slices(list(of_one), rank=rank, num_threads=self.num_threads)
            for rank, of_one in itertools.groupby(filled, self.rank_of)
        )

        def read(num_bytes: int) -> Iterator[memoryview]:
            left = num_bytes
            while left:
                view = next(slices).view
                left -= len(view)
                assert left >= 0, (names, num_bytes)
                self.count(len(view))
                yield view

        return read


def _join(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of different ranks as one: groups of all optimizers, keys of all dicts."""
    joined: dict[str, Any] = {}
    for values in parts:
        for key, value in values.items():
            first = joined.setdefault(key, value)
            if first is not value and key != "rng":  # generators of different kinds have different keys
                is_pair = is_optimizer(first) and is_optimizer(value)
                joined[key] = (_join_optimizers if is_pair else _with_missing)(first, value)
    return joined


def _with_missing(first: Any, other: Any) -> Any:
    """Return nested dicts with the keys that only those of another rank have."""
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return first
    joined = copy.copy(first)  # of the same class
    for key, value in other.items():
        joined[key] = _with_missing(joined[key], value) if key in joined else value
    return joined


def _join_optimizers(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Add the groups and the state of another rank's parameters to those of an optimizer."""
    known = {name for group in first["param_groups"] for name in group["params"]}
    groups = [
        {**group, "params": [name for name in group["params"] if name not in known]}
        for group in other["param_groups"]
    ]
    return {
        **first,
        "param_groups": [*first["param_groups"], *(group for group in groups if group["params"])],
        "state": {**other.get("state", {}), **first.get("state", {})},
    }
