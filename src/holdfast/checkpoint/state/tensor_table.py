"""Tensor table: the tensors of a capture, row by row, with their ties, for comparison with the next one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from msgspec import Struct

from holdfast.checkpoint.format.layout import Region, check_name
from holdfast.checkpoint.state.entry import Replication
from holdfast.checkpoint.state.holders import HolderAgreement
from holdfast.checkpoint.state.sharding import Sharding, ShardLayout, layout_of, local_of, shape_of
from holdfast.checkpoint.state.tensors import (
    PLAIN,
    is_local_shard,
    is_same_view,
    is_savable,
    may_be_reread,
    show_same_memory,
    shows_same_memory,
    unsavable,
)
from holdfast.errors import InvalidInput, Unsupported

_get_dtype = operator.attrgetter("dtype")
_UNKNOWN_PART = (
    "its parameter holds a shard of a global tensor, and it does not show which part it belongs to. Give it "
    "the parameter's global_shape, global_offsets, local_offsets and local_sizes, or mark the optimizer with "
    "per_rank() to restore it on the same number of ranks."
)


class Role(NamedTuple):
    """Role of a tensor in the state. A tuple, because thousands are compared at each capture."""

    replication: Replication
    is_named: bool = False  # a parameter that optimizers name their state after
    is_owned: bool = False  # changed only by a step of an optimizer in the state
    in_module: bool = False
    is_temporary: bool = False  # in memory that its object may release
    is_inner: bool = False  # an inner tensor of a parameter that is a composite tensor
    follows: str | None = None  # the parameter whose state it is, held by the same ranks


class StateStructure(Struct, frozen=True, eq=False):
    """All facts about a captured state except its bytes and values."""

    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    devices: list[torch.device]
    shardings: dict[str, Sharding]  # of every name that is not per rank: the region of each rank
    per_rank: frozenset[str]  # names with a different tensor on every rank
    owned: frozenset[str]  # changed only by a step of an optimizer in the state
    temporary: frozenset[str]  # in memory that their object may release
    frozen: frozenset[str]  # module parameters that no optimizer trains, if the state has an optimizer
    tied: dict[str, str]  # alias -> name of the same tensor
    lowest: dict[str, ShardLayout]  # the layouts of all holders, where only the lowest has the true bytes
    places: dict[str, dict[Region, Region]]  # of tensors with shard attributes: where each region is in it

    def has_same_facts(self, other: StateStructure) -> bool:
        """Return True if all facts are equal, including the order of names."""
        return all(getattr(self, fact) == getattr(other, fact) for fact in self.__struct_fields__)


class TensorTable:
    """The tensors of a state, in discovery order.

    It holds the live tensors and a detached alias of each, so the memory of a tensor that training replaces
    stays in use until the next capture. That also makes comparing safe: while the alias holds the old memory,
    no new tensor can start at the same address. With one rank, nothing is per rank.
    """

    def __init__(self, rank: int, world_size: int, checked: set[str]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.names: list[str] = []
        self.roles: list[Role] = []
        self.tensors: dict[str, torch.Tensor] = {}  # aliases of the rows that hold bytes, by name
        self.tied: dict[str, str] = {}  # name of a row -> that of the row that holds its bytes
        self.parameter_names: dict[int, str] = {}  # id of a live parameter -> its first name
        self.owners: list[list[torch.Tensor]] = []  # parameters of each optimizer
        self.composites: dict[str, tuple[torch.Tensor, list[str]]] = {}  # parameters, with their inner names
        self.has_sharded = False
        self.live: list[torch.Tensor] = []
        self._aliases: list[torch.Tensor] = []
        self._types: list[type] = []
        self._dtypes: list[torch.dtype] = []
        self._may_be_reread: list[bool] = []
        self._specs: list[Any] = []  # specs of DTensors, by row
        self._layouts: list[ShardLayout | None] = []  # None for plain tensors
        self._shapes: list[tuple[int, ...]] = []  # of the whole tensors
        self._row_of: dict[str, int] = {}
        self._named: dict[int, str] = {}  # id of a sharded tensor -> name
        self._per_rank: set[str] = set()
        self._owned: set[str] = set()
        self._checked = checked  # names that have passed the check for reserved names; grows
        self._at: dict[int, list[str]] = {}  # address -> tensors that start there

    def add(self, name: str, tensor: torch.Tensor, role: Role) -> None:
        """Add a row."""
        local, layout = self._inspect(name, tensor, role)
        if name not in self._checked:
            check_name(name)
            self._checked.add(name)
        if name in self._row_of:
            raise InvalidInput(
                f"Two tensors of the state would both be saved as {name!r}: names are ambiguous if a key "
                "contains a dot, or a number and a string look the same. Nothing was written. Rename one of "
                "the keys.",
                key=name,
            )
        is_here = layout is None or self.rank in layout.holders
        holder = self._place(name, tensor, local, layout) if is_here else name
        # Also for tensors without gradient: the live tensor itself would always equal itself.
        alias = local.detach()
        if holder != name:
            self.tied[name] = holder
        elif is_here:
            self.tensors[name] = alias
            is_own = role.replication is Replication.OWN and layout is None
            if self.world_size > 1 and (is_own or role.replication is Replication.PER_RANK):
                self._per_rank.add(name)
        self._row_of[name] = len(self.names)
        if role.is_owned and is_here:
            self._owned.add(holder)
        if role.is_named:
            self.parameter_names.setdefault(id(tensor), name)
        self.names.append(name)
        self.roles.append(role)
        self.live.append(tensor)
        self._aliases.append(alias)
        self._types.append(type(tensor))
        self._dtypes.append(local.dtype)
        self._may_be_reread.append(may_be_reread(local))
        self._specs.append(_spec(tensor))
        self._layouts.append(layout)
        self._shapes.append(tuple(local.shape) if layout is None else shape_of(tensor))
        self.has_sharded = self.has_sharded or local is not tensor

    def name_composite(self, name: str, tensor: torch.Tensor, inner: list[str]) -> None:
        """Record a parameter that is a composite tensor, after the rows of its inner tensors."""
        self.composites[name] = tensor, inner
        self.parameter_names.setdefault(id(tensor), name)

    def has_composite(self, name: str, tensor: torch.Tensor, inner: list[str]) -> bool:
        """Return True if a parameter with this name and these inner tensors is recorded."""
        known = self.composites.get(name)
        return known is not None and known[0] is tensor and known[1] == inner

    def own(self, parameters: list[torch.Tensor]) -> None:
        """Mark an optimizer's parameters as changed only by its steps."""
        self.owners.append(parameters)
        names = self.parameter_names
        for parameter in parameters:
            name = names.get(id(parameter))
            for row in () if name is None else self._rows_of(name):
                if (holder := self.tied.get(row, row)) in self.tensors:
                    self._owned.add(holder)

    def own_memory(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the tensors in the memory of others as changed only by an optimizer's steps."""
        for tensor in tensors:
            local = local_of(tensor)
            address = local.data_ptr()
            for name in self._at.get(address, ()):
                if address and _is_within(self.tensors.get(name), local):
                    self._owned.add(name)

    def is_per_rank(self, name: str) -> bool:
        """Return True if each rank has its own tensor under `name`."""
        return any(self.tied.get(row, row) in self._per_rank for row in self._rows_of(name))

    def _rows_of(self, name: str) -> list[str]:
        """Return the names of the rows that a parameter is saved in."""
        return self.composites[name][1] if name in self.composites else [name]

    def structure(self, agreement: HolderAgreement, *, is_frozen_known: bool) -> StateStructure:
        """Return all facts about the tensors; see `TensorCollector.captured`."""
        shared: dict[tuple[tuple[int, ...], int], Sharding] = {}
        shardings: dict[str, Sharding] = {}
        lowest: dict[str, ShardLayout] = {}
        places: dict[str, dict[Region, Region]] = {}
        for name in self.tensors:
            row = self._row_of[name]
            role, raw, shape = self.roles[row], self._layouts[row], self._shapes[row]
            if name not in self._per_rank:
                layout = self._layout(row, agreement)
                shardings[name] = shared.setdefault((shape, id(layout)), Sharding(shape, layout))
            if role.replication is Replication.LOWEST and raw is None:
                lowest[name] = agreement.layout(name, raw, is_lowest=False, in_module=role.in_module)
            if raw is not None and raw.is_own:
                places[name] = dict(zip(raw.regions_of(self.rank, shape), raw.places, strict=True))
        tensors = self.tensors.values()
        temporary = (name for name, role in zip(self.names, self.roles, strict=True) if role.is_temporary)
        return StateStructure(
            names=list(self.tensors),
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[tensor.shape for tensor in tensors],
            devices=[tensor.device for tensor in tensors],
            shardings=shardings,
            per_rank=frozenset(self._per_rank),
            owned=frozenset(self._owned),
            temporary=frozenset(self.tied.get(name, name) for name in temporary),
            frozen=self._frozen() if is_frozen_known and self.owners else frozenset(),
            tied=dict(self.tied),
            lowest=lowest,
            places=places,
        )

    def _inspect(
        self, name: str, tensor: torch.Tensor, role: Role
    ) -> tuple[torch.Tensor, ShardLayout | None]:
        """Return this rank's part of a tensor and its layout. Plain tensors have none."""
        is_whole = role.replication is Replication.PER_RANK or not is_local_shard(tensor)
        if type(tensor) in PLAIN and is_whole and is_savable(tensor):
            return tensor, None
        try:
            local, layout = local_of(tensor), layout_of(tensor)
        except Unsupported as error:
            raise unsavable(tensor, name, str(error)) from error
        if not is_savable(local):
            raise unsavable(local, name)
        if role.replication is Replication.PER_RANK or layout is None:
            return local, None
        regions = () if layout.is_own else layout.regions_of(self.rank, shape_of(tensor))
        region = next(iter(regions), None)
        if region is not None and not (region.sizes == local.shape or region.num_items == local.numel() == 0):
            found = f"it is a {type(tensor).__name__} whose part here is {list(local.shape)}"
            raise unsavable(tensor, name, f"{found}, but its placements require {list(region.sizes)}.")
        return local, layout

    def _place(self, name: str, tensor: torch.Tensor, local: torch.Tensor, layout: ShardLayout | None) -> str:
        """Record where a tensor starts; return the name of a row with the same tensor, or its own."""
        if layout is not None:
            # By the object, not its memory: all ranks must find the same ties, also with an empty part.
            first = self._named.setdefault(id(tensor), name)
            if first is not name:
                return first
        address = local.data_ptr()
        others = self._at.setdefault(address, [])
        if address and layout is None:  # an empty tensor has no address and no twin
            for other in others:
                if self._layouts[self._row_of[other]] is None and is_same_view(self.tensors[other], local):
                    return other
        others.append(name)
        return name

    def _layout(self, row: int, agreement: HolderAgreement) -> ShardLayout:
        """Return the agreed layout of a row, or its own without an agreement."""
        role, raw = self.roles[row], self._layouts[row]
        follows = None if role.follows is None else self._rows_of(role.follows)[0]
        if follows is not None and follows in self._row_of:
            parameter = self._row_of[self.tied.get(follows, follows)]
            own = self._layouts[parameter]
            is_shard = own is not None and own.is_own and own.regions is not None
            if is_shard and raw is None and self._shapes[row]:
                raise unsavable(self._aliases[row], self.names[row], _UNKNOWN_PART)
            return agreement.follow(raw, self._layout(parameter, agreement), own)
        is_lowest = role.replication is Replication.LOWEST
        known = agreement.layout(self.names[row], raw, is_lowest=is_lowest, in_module=role.in_module)
        if raw is None or not raw.is_own:
            return known
        shape = self._shapes[row]
        # Shards that have changed since the ranks met: a commit checks that all ranks' shards fit together.
        mine = set(raw.regions_of(self.rank, shape))
        return known if set(known.regions_of(self.rank, shape)) == mine else raw

    def _frozen(self) -> frozenset[str]:
        """Return module parameters that no optimizer owns."""
        holders = {
            self.tied.get(name, name)
            for name, role in zip(self.names, self.roles, strict=True)
            if (role.is_named or role.is_inner) and role.in_module
        }
        return frozenset(holders & self.tensors.keys()).difference(self._owned, self._per_rank)

    def is_same(self, row: int, tensor: torch.Tensor, part: torch.Tensor) -> bool:
        """Return True if a tensor shows a row's memory alike; a parameter must be the same object."""
        return (
            type(tensor) is self._types[row]
            and (tensor is self.live[row] or not self.roles[row].is_named)
            and shows_same_memory(part, self._aliases[row])
            and self._has_same_sharding(row, tensor)
        )

    def note_object(self, row: int, tensor: torch.Tensor) -> None:
        """Take the object that shows a row's memory now: it may have a counter of writes of its own."""
        if self._layouts[row] is None:  # a sharded tensor is found by the id of its object
            self.live[row] = tensor

    def are_same(
        self, row: int, names: Sequence[str], roles: Sequence[Role], tensors: list[torch.Tensor]
    ) -> bool:
        """Return True if the rows from `row` on have these objects, showing the same memory."""
        at = slice(row, row + len(names))
        live, chosen = self.live[at], self._may_be_reread[at]
        is_same = (
            self.names[at] == names
            and self.roles[at] == roles
            and len(tensors) == len(live)
            # Loops without the interpreter and without lists: this runs for every tensor at every save.
            and all(map(operator.is_, tensors, live))
            and all(map(operator.is_, map(type, tensors), self._types[at]))
        )
        if not is_same:
            return False
        if self.has_sharded:
            if not all(map(self._has_same_sharding, range(row, row + len(names)), tensors)):
                return False
            tensors = list(map(self.part, range(row, row + len(names)), tensors))
        return (
            all(map(operator.is_, map(_get_dtype, tensors), self._dtypes[at]))
            and show_same_memory(tensors, self._aliases[at])
            and all(map(shows_same_memory, compress(tensors, chosen), compress(self._aliases[at], chosen)))
        )

    def part(self, row: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that the row saves."""
        is_whole = self._layouts[row] is None and type(tensor) in PLAIN
        return tensor if is_whole else local_of(tensor)

    def _has_same_sharding(self, row: int, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` has the row's global shape and sharding."""
        spec, layout = self._specs[row], self._layouts[row]
        if layout is None:
            return self.roles[row].replication is Replication.PER_RANK or not is_local_shard(tensor)
        if spec is not None and spec is _spec(tensor):
            return True
        new = layout_of(tensor)
        is_same = new is not None and (new, new.places) == (layout, layout.places)
        return is_same and shape_of(tensor) == self._shapes[row]

    def can_replace(self, row: int, tensor: torch.Tensor, part: torch.Tensor) -> bool:
        """Return True if a tensor can replace a row's without affecting any other row."""
        name, old, new = self.names[row], self._aliases[row].data_ptr(), part.data_ptr()
        return (
            not self.roles[row].is_named
            and name in self.tensors
            and (type(tensor) is self._types[row] or (type(tensor) in PLAIN and self._types[row] in PLAIN))
            and self._has_same_sharding(row, tensor)
            and (
                self._layouts[row] is None
                or (id(tensor) not in self._named and part.shape == self._aliases[row].shape)
            )
            and name not in self.tied
            and name not in self.tied.values()
            and not (old and len(self._at[old]) > 1)
            and not (new and new in self._at)
        )

    def replace(self, row: int, tensor: torch.Tensor) -> bool:
        """Replace a row's tensor; return True if dtype, shape or device have changed."""
        local = self.part(row, tensor)
        name, old, alias = self.names[row], self._aliases[row], local.detach()
        if self._layouts[row] is not None:
            self._named.pop(id(self.live[row]), None)
            self._named[id(tensor)] = name
        if old.data_ptr():
            del self._at[old.data_ptr()]
        self._at.setdefault(alias.data_ptr(), [name])
        self.live[row], self._aliases[row], self.tensors[name] = tensor, alias, alias
        self._shapes[row] = tuple(alias.shape) if self._layouts[row] is None else shape_of(tensor)
        self._types[row], self._dtypes[row], self._specs[row] = type(tensor), local.dtype, _spec(tensor)
        self._may_be_reread[row] = may_be_reread(local)
        return old.dtype != alias.dtype or old.shape != alias.shape or old.device != alias.device


def _spec(tensor: torch.Tensor) -> Any:
    """Return a DTensor's spec, or None. A changed DTensor has another spec."""
    return getattr(tensor, "_spec", None) if type(tensor) not in PLAIN else None


def _is_within(found: torch.Tensor | None, owned: torch.Tensor) -> bool:
    """Return True if a tensor lies in the memory of the owned one."""
    if found is None or found.device != owned.device:
        return False
    is_dense = found.is_contiguous() and owned.is_contiguous() and found.nbytes <= owned.nbytes
    return is_dense or is_same_view(found, owned)
