"""Rows of composite tensors: their inner tensors under the tensor's name, collected and listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.state.capture import TensorCollector
from holdfast.checkpoint.state.composites import is_composite
from holdfast.checkpoint.state.replication import Replication
from holdfast.checkpoint.state.tensor_table import Role
from holdfast.checkpoint.state.tree import extract_tensors, references


def capture_composite(collector: TensorCollector, name: str, tensor: torch.Tensor, role: Role) -> Any:
    """Collect the inner tensors of a composite tensor, and return its encoded description."""
    tree = extract_tensors(tensor, name, collector.callback_for(_inner_role(role)), named_types=True)
    if role.is_named:
        collector.name_composite(name, tensor, list(references(tree)))
    return encode(tree, name)


def inner_rows(name: str, tensor: torch.Tensor, role: Role) -> Iterator[tuple[str, torch.Tensor, Role]]:
    """Yield name, tensor and role of the rows that a tensor is saved in: itself, or its inner tensors."""
    if not is_composite(tensor):
        yield name, tensor, role
        return
    found: list[tuple[str, torch.Tensor, Role]] = []
    extract_tensors(tensor, name, _InnerRows(found, _inner_role(role)), named_types=True)
    yield from found


@dataclass(frozen=True, slots=True)
class _InnerRows:
    """List of inner tensors, filled by `extract_tensors`."""

    found: list[tuple[str, torch.Tensor, Role]]
    role: Role

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        self.found.append((name, tensor, self.role))

    def per_rank(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is different on every rank."""
        self.found.append((name, tensor, self.role._replace(replication=Replication.PER_RANK)))


def _inner_role(role: Role) -> Role:
    return role._replace(is_named=False, is_inner=role.is_named)
