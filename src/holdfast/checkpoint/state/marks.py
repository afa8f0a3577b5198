"""Marks of a state: values that differ once training has changed it, far cheaper than a capture."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from typing_extensions import override

from holdfast.checkpoint.state.capture import TensorCollector
from holdfast.checkpoint.state.composites import is_composite
from holdfast.checkpoint.state.sharding import local_of
from holdfast.checkpoint.state.tensor_table import Role
from holdfast.checkpoint.state.tensors import PLAIN, may_be_reread, show_same_memory, shows_same_memory

_PLAIN = frozenset(PLAIN)
_get_version, _get_dtype = operator.attrgetter("_version"), operator.attrgetter("dtype")


class MemoryMarks:
    """Marks of the memory of some tensors, one after the other.

    It holds an alias of each tensor of the newest mark. So the memory of a tensor that training replaces
    stays in use until the next mark, and no new tensor can start at the same address before it.
    """

    def __init__(self) -> None:
        self._aliases: list[torch.Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self._rereadable: list[int] = []  # places of those that another view could show differently
        self._number = 0  # of the memory that the aliases show

    def mark(self, tensors: list[torch.Tensor]) -> tuple[int, list[int]]:
        """Return a value that differs if the memory is another, or was written.

        Args:
            tensors: this rank's parts of the state's tensors.
        """
        if not self._are_shown_by(tensors):
            self._aliases = [tensor.detach() for tensor in tensors]
            self._dtypes = list(map(_get_dtype, tensors))
            self._rereadable = [at for at, alias in enumerate(self._aliases) if may_be_reread(alias)]
            self._number += 1
        return self._number, versions(tensors)

    def release(self) -> None:
        """Release the memory. The next mark differs from all before."""
        self._aliases, self._dtypes, self._rereadable = [], [], []
        self._number += 1

    def _are_shown_by(self, tensors: list[torch.Tensor]) -> bool:
        return (
            list(map(_get_dtype, tensors)) == self._dtypes
            and show_same_memory(tensors, self._aliases)
            and all(shows_same_memory(tensors[at], self._aliases[at]) for at in self._rereadable)
        )


class MarkCollector(TensorCollector):
    """Collects the tensors of entries for a mark, without names."""

    def __init__(self) -> None:
        super().__init__(0, 1, set())
        self.tensors: list[torch.Tensor] = []

    @override
    def collect(self, name: str, tensor: torch.Tensor, role: Role) -> str:
        self.tensors.append(tensor if type(tensor) in _PLAIN else local_of(tensor))
        return name

    @override
    def collect_all(self, names: list[str], roles: list[Role], tensors: list[torch.Tensor]) -> bool:
        if _PLAIN.issuperset(map(type, tensors)):
            self.tensors += tensors
            return True
        if any(map(is_composite, tensors)):
            return False
        self.tensors += map(local_of, tensors)
        return True

    @override
    def name_composite(self, name: str, tensor: torch.Tensor, inner: list[str]) -> None:
        pass


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return PyTorch's counters of writes. Tensors made in inference mode have none, and count as 0."""
    tensors = list(tensors)
    try:
        return list(map(_get_version, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
