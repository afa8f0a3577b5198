"""Part of a checkpoint that is exported: tensors by name, their bytes in order, and the values."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.exchange.trees import select, touched_by
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.format.nesting import is_optimizer
from holdfast.checkpoint.restore.checkpoint import Checkpoint


@dataclass(slots=True)
class ExportSelection:
    """Checkpoint as one rank sees it, with what only other ranks have, or a part of it."""

    checkpoint: Checkpoint
    rank: int
    only: tuple[str, ...] | None  # selected prefixes; None for all
    rename: dict[str, str]  # new prefix by old prefix; "" removes a prefix
    num_threads: int
    on_bytes: Callable[[int], None] | None = None
    tensors: dict[str, Shard] = field(default_factory=dict)  # selected ones by name, tied ones included
    every_value: dict[str, Any] = field(default_factory=dict)  # also those that only other ranks have
    num_bytes: int = 0  # of tensors that have been read so far
    _rank_of: dict[str, int] = field(default_factory=dict)  # of tensors that only other ranks have
    _first_of: dict[str, str] = field(default_factory=dict)  # first selected alias of other names

    @classmethod
    def choose(
        cls,
        checkpoint: Checkpoint,
        *,
        rank: int,
        only: Iterable[str] | None,
        rename: Mapping[str, str] | None,
        num_threads: int,
        on_bytes: Callable[[int], None] | None = None,
    ) -> ExportSelection:
        """Select the tensors and values with any of the prefixes."""
        prefixes = None if only is None else tuple(only)
        one = cls(checkpoint, rank, prefixes, dict(rename or {}), num_threads, on_bytes)
        shapes, others = checkpoint.facts(rank), [of for of in range(checkpoint.world_size) if of != rank]
        if checkpoint.value_index() is None:
            one.every_value = _join(checkpoint.values(of) for of in (rank, *others))
        else:  # the ranks have divided the values
            one.every_value = checkpoint.values(rank)
        if not shapes.keys() >= checkpoint.manifest.tensors.keys():
            for of in others:
                found = {name: facts for name, facts in checkpoint.facts(of).items() if name not in shapes}
                shapes |= found
                one._rank_of |= dict.fromkeys(found, of)
        names = [*shapes, *(key for key in one.every_value if key not in shapes)]
        chosen = select(names, prefixes, f"Step {checkpoint.step}")
        one.tensors = {name: Shard.whole(name, *shapes[name]) for name in chosen if name in shapes}
        for name in one.tensors:
            one.original(name)  # in this order, so that the first alias does not depend on later calls
        return one

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

    def stream(self, names: Sequence[str]) -> TensorStream:
        """Return a stream of the bytes of some tensors, one after the other."""
        return TensorStream(self, names)


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


class TensorStream:
    """Bytes of tensors in a fixed order, read tensor by tensor."""

    def __init__(self, selection: ExportSelection, names: Sequence[str]) -> None:
        self._selection = selection
        self._tensors = [selection.tensors[name] for name in names]
        filled = [tensor.name for tensor in self._tensors if tensor.num_bytes]
        self._slices = itertools.chain.from_iterable(
            selection.checkpoint.slices(list(of_one), rank=rank, num_threads=selection.num_threads)
            for rank, of_one in itertools.groupby(filled, selection.rank_of)
        )
        self._at = 0

    def read(self, num_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of the next tensor, which has `num_bytes`. A view is valid until the next one."""
        tensor = self._tensors[self._at]
        assert tensor.num_bytes == num_bytes, (tensor, num_bytes)
        self._at += 1
        left = num_bytes
        while left:
            view = next(self._slices).view
            left -= len(view)
            self._selection.count(len(view))
            yield view
