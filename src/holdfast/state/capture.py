"""Captured: the live tensors and values of a state, by name; and the sink that collects them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.state.agreement import Agreement
from holdfast.state.sharding import Sharding, local_of
from holdfast.state.spread import Spread
from holdfast.state.table import Role, Structure, Table
from holdfast.state.tensors import is_savable


@dataclass(frozen=True, slots=True)
class Captured:
    """A state at one moment: its tensors still live, its values already encoded.

    `tensors` are detached and share memory with the training objects; of tensors that are one and the same
    only the first is among them. Of a sharded tensor it is this rank's part, perhaps empty; a rank that is
    outside a tensor's mesh does not list it. The order is the same on every rank whose state has the same
    structure.

    `structure` is the same object as in the capture before if nothing but bytes and values has changed: not
    names and their order, dtypes, shapes, devices, `shardings`, `per_rank`, `owned`, `frozen` and `tied`.
    Else it is a new one.
    """

    tensors: dict[str, torch.Tensor]
    shardings: dict[str, Sharding]  # of every name that is not per rank; which ranks hold which box
    per_rank: frozenset[str]  # names of which every rank has its own
    owned: frozenset[str]  # only a step of an optimizer in the state changes these
    frozen: frozenset[str]  # module parameters that no optimizer trains, if the state has an optimizer
    tied: dict[str, str]  # alias -> name of the tensor that it is
    values: dict[str, Any]  # top-level key -> tagged JSON, with {"$tensor": name} for tensors
    structure: Structure  # to be compared by identity


class Sink:
    """Collects tensors by name while a state is walked.

    It follows the table of the capture before for as long as the same tensors come in the same order, which
    costs a comparison each. At the first difference it makes a new table, in which ties are looked for anew.

    Args:
        rank: this rank.
        world_size: number of ranks; with one rank, nothing is per rank.
        checked: names that are known not to be reserved; grows.
        followed: table of the capture before.
    """

    def __init__(self, rank: int, world_size: int, checked: set[str], followed: Table | None = None) -> None:
        is_usable = followed is not None and (followed.rank, followed.world_size) == (rank, world_size)
        self._followed = followed if is_usable else None
        self._new_table = Table(rank, world_size, checked)
        self._row = 0  # of the table that is followed: all before it are confirmed
        self._owner = 0
        self._replaced: dict[int, torch.Tensor] = {}  # row -> the tensor that stands there now
        self._replaced_at: set[int] = set()  # their addresses

    @property
    def table(self) -> Table:
        """The table that is followed, or the new one."""
        return self._followed or self._new_table

    @property
    def parameter_names(self) -> dict[int, str]:
        """First name of each live parameter by id. The same object as long as nothing in it has changed."""
        return self.table.parameter_names

    def add(self, name: str, tensor: torch.Tensor, spread: Spread) -> str:
        """Take a tensor that is nothing special; see `take`."""
        return self.take(name, tensor, Role(spread))

    def take(self, name: str, tensor: torch.Tensor, role: Role) -> str:
        """Take a tensor; answers the name under which its bytes stand, another one if it is tied.

        Raises:
            Unsupported: a tensor that cannot be saved.
            InvalidInput: a name that is taken or reserved.
        """
        if self._followed is not None:
            if self._confirm(self._followed, name, tensor, role):
                self._row += 1
                return self._followed.holders[self._row - 1]
            self._leave(self._followed)
        return self._new_table.add(name, tensor, role)

    def take_all(self, names: list[str], roles: list[Role], tensors: list[torch.Tensor]) -> None:
        """Take tensors as `take` does, quickly if they are the same objects as in the capture before."""
        if self._followed is not None and self._followed.are_same(self._row, names, roles, tensors):
            self._row += len(names)
            return
        for name, role, tensor in zip(names, roles, tensors, strict=True):
            self.take(name, tensor, role)

    def emitter(self, spread: Spread) -> Callable[[str, torch.Tensor], object]:
        """A function that takes tensors that are nothing special, for `tree.strip`."""
        return self.emitter_of(Role(spread))

    def emitter_of(self, role: Role) -> Callable[[str, torch.Tensor], object]:
        """A function that takes tensors with one role, for `tree.strip`."""
        return lambda name, tensor: self.take(name, tensor, role)

    def own(self, parameters: list[torch.Tensor]) -> None:
        """Mark an optimizer's parameters as changed only by its steps; all named tensors are taken by now."""
        table, i = self._followed, self._owner
        if table is not None:
            if i < len(table.owners) and _are_same_objects(table.owners[i], parameters):
                self._owner += 1
                return
            self._leave(table)
        self._new_table.own(parameters)

    def is_per_rank(self, name: str) -> bool:
        """True if every rank has its own of a name that was taken."""
        return self.table.is_per_rank(name)

    def captured(
        self,
        values: dict[str, Any],
        structure: Structure | None,
        agreement: Agreement,
        *,
        is_frozen_known: bool,
    ) -> Captured:
        """All that was taken, with the encoded values.

        Args:
            values: encoded values by top-level key.
            structure: that of the capture before, made by the same agreement; it is kept if it still holds.
            agreement: who holds plain tensors.
            is_frozen_known: every optimizer of the state has told what it owns.
        """
        if self._followed is not None and not self._is_at_end(self._followed):
            self._leave(self._followed)
        is_kept = self._followed is not None and not self._put_replaced(self._followed)
        if structure is None or not is_kept:
            new = self.table.structure(agreement, is_frozen_known=is_frozen_known)
            structure = structure if structure is not None and structure.says_the_same(new) else new
        return Captured(
            tensors=dict(self.table.tensors),  # a copy: a later capture may put new tensors into the table
            shardings=structure.shardings,
            per_rank=structure.per_rank,
            owned=structure.owned,
            frozen=structure.frozen,
            tied=structure.tied,
            values=values,
            structure=structure,
        )

    def _confirm(self, table: Table, name: str, tensor: torch.Tensor, role: Role) -> bool:
        """True if the next row is this one, or is so but for its tensor, which nothing else depends on."""
        row = self._row
        if not table.has(row, name, role):
            return False
        if table.is_same(row, tensor):
            return True
        if not is_savable(local_of(tensor)) or not table.can_replace(row, tensor):
            return False
        address = local_of(tensor).data_ptr()
        if address and address in self._replaced_at:
            return False
        self._replaced_at.add(address)
        self._replaced[row] = tensor
        return True

    def _is_at_end(self, table: Table) -> bool:
        return self._row == len(table.names) and self._owner == len(table.owners)

    def _leave(self, table: Table) -> None:
        """Put all that was confirmed into the new table and go on with that one."""
        self._followed = None
        for row in range(self._row):
            tensor = self._replaced.get(row)
            live = table.live(row) if tensor is None else tensor
            self._new_table.add(table.names[row], live, table.roles[row])
        for parameters in table.owners[: self._owner]:
            self._new_table.own(parameters)

    def _put_replaced(self, table: Table) -> bool:
        """Put the replaced tensors into the followed table; answers True if its structure has changed."""
        changes = [table.replace(row, tensor) for row, tensor in self._replaced.items()]
        return any(changes)


def _are_same_objects(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))
