"""Table: the tensors that a capture found, row by row, with their ties; kept to compare the next one with."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import torch

from holdfast.errors import InvalidInput
from holdfast.format.layout import check_name
from holdfast.state.spread import Spread
from holdfast.state.tensors import (
    is_same_view,
    is_savable,
    may_be_reread,
    refuse,
    show_same_memory,
    shows_same_memory,
)

_get_dtype = operator.attrgetter("dtype")


class Role(NamedTuple):
    """What a tensor is in the state. A tuple, because thousands are compared at each capture."""

    spread: Spread
    is_named: bool = False  # a parameter after which optimizers name their state
    is_owned: bool = False  # only a step of an optimizer in the state changes it


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """All facts about a captured state but its bytes; kept, as an object, while nothing changes."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    devices: list[torch.device]
    per_rank: frozenset[str]
    lowest: frozenset[str]
    owned: frozenset[str]
    tied: dict[str, str]

    def says_the_same(self, other: Structure) -> bool:
        """True if all facts are equal, the order of names included."""
        return all(getattr(self, fact) == getattr(other, fact) for fact in self.__slots__)


class Table:
    """The tensors of a state in the order in which they were found.

    It holds the live tensors and a detached alias of each, so the memory of a tensor that training replaces
    stays taken until the next capture. That is also what makes comparing safe: while the alias holds the old
    memory, no new tensor can come to stand at the same address.

    Args:
        world_size: number of ranks; with one rank, nothing is per rank.
        checked: names that are known not to be reserved; grows.
    """

    def __init__(self, world_size: int, checked: set[str]) -> None:
        self.world_size = world_size
        self.names: list[str] = []
        self.roles: list[Role] = []
        self.holders: list[str] = []  # name under which the bytes of a row stand; another one if it is tied
        self.tensors: dict[str, torch.Tensor] = {}  # aliases of the rows that hold bytes, by name
        self.tied: dict[str, str] = {}
        self.parameter_names: dict[int, str] = {}  # id of a live parameter -> its first name
        self.owners: list[list[torch.Tensor]] = []  # parameters of each optimizer
        self._live: list[torch.Tensor] = []
        self._aliases: list[torch.Tensor] = []
        self._types: list[type] = []
        self._dtypes: list[torch.dtype] = []
        self._may_be_reread: list[bool] = []
        self._per_rank: set[str] = set()
        self._lowest: set[str] = set()
        self._owned: set[str] = set()
        self._checked = checked
        self._at: dict[int, str] = {}  # address -> first tensor that starts there
        self._more: dict[int, list[str]] = {}  # address -> other tensors that start there

    # -- filling ---------------------------------------------------------------------------------------------

    def add(self, name: str, tensor: torch.Tensor, role: Role) -> str:
        """Add a row; answers the name under which the tensor's bytes stand.

        Raises:
            Unsupported: a tensor that cannot be saved.
            InvalidInput: a name that is taken or reserved.
        """
        if not is_savable(tensor):
            raise refuse(tensor, name)
        if name not in self._checked:
            check_name(name)
            self._checked.add(name)
        if name in self.tensors or name in self.tied:
            raise _collision(name)
        holder = self._place(name, tensor)
        # Also of tensors without gradient: the live tensor itself would always be equal to itself.
        alias = tensor.detach()
        if holder == name:
            self.tensors[name] = alias
            self._note_spread(name, role.spread)
        else:
            self.tied[name] = holder
        if role.is_owned:
            self._owned.add(holder)
        if role.is_named:
            self.parameter_names.setdefault(id(tensor), name)
        self.names.append(name)
        self.roles.append(role)
        self.holders.append(holder)
        self._live.append(tensor)
        self._aliases.append(alias)
        self._types.append(type(tensor))
        self._dtypes.append(tensor.dtype)
        self._may_be_reread.append(may_be_reread(tensor))
        return holder

    def own(self, parameters: list[torch.Tensor]) -> None:
        """Mark an optimizer's parameters as changed only by its steps."""
        self.owners.append(parameters)
        names = self.parameter_names
        for parameter in parameters:
            if name := names.get(id(parameter)):
                self._owned.add(self.tied.get(name, name))

    def is_per_rank(self, name: str) -> bool:
        """True if every rank has its own of this name."""
        return self.tied.get(name, name) in self._per_rank

    def structure(self) -> Structure:
        """All facts about the tensors."""
        tensors = self.tensors.values()
        return Structure(
            names=list(self.tensors),
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[tensor.shape for tensor in tensors],
            devices=[tensor.device for tensor in tensors],
            per_rank=frozenset(self._per_rank),
            lowest=frozenset(self._lowest),
            owned=frozenset(self._owned),
            tied=dict(self.tied),
        )

    def _place(self, name: str, tensor: torch.Tensor) -> str:
        """Remember where a tensor starts; answers the name of a row that is the same tensor, or its own."""
        address = tensor.data_ptr()
        if self._at.setdefault(address, name) is name:
            return name
        # An empty tensor has no address and no twin.
        others = [self._at[address], *self._more.get(address, ())] if address else []
        for other in others:
            if is_same_view(self.tensors[other], tensor):
                return other
        self._more.setdefault(address, []).append(name)
        return name

    def _note_spread(self, name: str, spread: Spread) -> None:
        if self.world_size > 1 and spread is not Spread.REPLICATED:
            (self._lowest if spread is Spread.LOWEST else self._per_rank).add(name)

    # -- comparing -------------------------------------------------------------------------------------------

    def live(self, row: int) -> torch.Tensor:
        """The training object's tensor of a row."""
        return self._live[row]

    def has(self, row: int, name: str, role: Role) -> bool:
        """True if a row has this name and role."""
        return row < len(self.names) and self.names[row] == name and self.roles[row] == role

    def is_same(self, row: int, tensor: torch.Tensor) -> bool:
        """True if a tensor shows the memory of a row in the same way; parameters must be the same object."""
        if self.roles[row].is_named and tensor is not self._live[row]:
            return False
        return type(tensor) is self._types[row] and shows_same_memory(tensor, self._aliases[row])

    def are_same(
        self, row: int, names: Sequence[str], roles: Sequence[Role], tensors: list[torch.Tensor]
    ) -> bool:
        """True if the rows from `row` on are these, with the same objects that show the same memory."""
        at = slice(row, row + len(names))
        live = self._live[at]
        return (
            self.names[at] == names
            and self.roles[at] == roles
            and len(tensors) == len(live)
            # Loops without the interpreter and without lists: this runs for every tensor at every save.
            and all(map(operator.is_, tensors, live))
            and all(map(operator.is_, map(type, tensors), self._types[at]))
            and all(map(operator.is_, map(_get_dtype, tensors), self._dtypes[at]))
            and show_same_memory(tensors, self._aliases[at])
            and all(map(shows_same_memory, *self._rereadable(at)))
        )

    def _rereadable(self, at: slice) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        chosen = self._may_be_reread[at]
        return compress(self._live[at], chosen), compress(self._aliases[at], chosen)

    def can_replace(self, row: int, tensor: torch.Tensor) -> bool:
        """True if a tensor can take the place of a row's without any other row being touched."""
        name, old, new = self.names[row], self._aliases[row].data_ptr(), tensor.data_ptr()
        return (
            not self.roles[row].is_named
            and self.holders[row] == name
            and name not in self.tied.values()
            and not (old and old in self._more)
            and not (new and new in self._at)
        )

    def replace(self, row: int, tensor: torch.Tensor) -> bool:
        """Put a tensor in the place of a row's; answers True if dtype, shape or device have changed."""
        name, old, alias = self.names[row], self._aliases[row], tensor.detach()
        if old.data_ptr():
            del self._at[old.data_ptr()]
        self._at.setdefault(alias.data_ptr(), name)
        self._live[row], self._aliases[row], self.tensors[name] = tensor, alias, alias
        self._types[row], self._dtypes[row] = type(tensor), tensor.dtype
        self._may_be_reread[row] = may_be_reread(tensor)
        return old.dtype != alias.dtype or old.shape != alias.shape or old.device != alias.device


def _collision(name: str) -> InvalidInput:
    message = (
        f"Two tensors of the state would both be saved as {name!r}: a key with a dot in it, or a number and "
        "a string that read the same, make names ambiguous. Nothing was written. Rename one of the keys."
    )
    return InvalidInput(message, key=name)
