"""Tensor table: the tensors of a capture, row by row, with their ties, which the next capture follows."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from typing_extensions import override

from holdfast.checkpoint.format.layout import Region, check_name
from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.state.entry import Replication
from holdfast.checkpoint.state.holders import HolderAgreement
from holdfast.checkpoint.state.sharding import Sharding, ShardLayout, layout_of, local_of, shape_of
from holdfast.checkpoint.state.tensors import (
    PLAIN,
    is_composite,
    is_local_shard,
    is_same_view,
    is_savable,
    may_be_reread,
    show_same_memory,
    shows_same_memory,
    unsavable,
)
from holdfast.checkpoint.state.tree import Extraction, references
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


class StateStructure(Struct, frozen=True):
    """All facts about a captured state except its bytes and values."""

    rows: list[tuple[str, torch.dtype, torch.Size, torch.device]]  # name and kind of each tensor
    shardings: dict[str, Sharding]  # of every name that is not per rank: the region of each rank
    per_rank: frozenset[str]  # names with a different tensor on every rank
    owned: frozenset[str]  # changed only by a step of an optimizer in the state
    temporary: frozenset[str]  # in memory that their object may release
    frozen: frozenset[str]  # module parameters that no optimizer trains, if the state has an optimizer
    tied: dict[str, str]  # alias -> name of the same tensor
    lowest: dict[str, ShardLayout]  # the layouts of all holders, where only the lowest has the true bytes
    places: dict[str, dict[Region, Region]]  # of tensors with shard attributes: where each region is in it


class CapturedState(Struct, frozen=True):
    """A state at one moment: its tensors still live, its values already encoded.

    `tensors` are detached and share memory with the training objects; of tied tensors only the first is
    included. A sharded tensor appears as this rank's part, perhaps empty; a rank outside a tensor's mesh does
    not list it. The order is the same on every rank whose state has the same structure.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]  # top-level key -> tagged JSON, with {"$tensor": name} for tensors
    structure: StateStructure  # the same object as in the previous capture if no fact in it has changed


class TensorTable:
    """The tensors of a state, collected by name while a capture walks it. The next capture follows the table.

    As long as the same tensors come in the same order, that costs one comparison each. A tensor may take the
    place of a like one. At any other difference the table begins again, and searches for ties again.

    It holds the live tensors and a detached alias of each, so the memory of a tensor that training replaces
    stays in use until the next capture. That also makes comparing safe: while the alias holds the old memory,
    no new tensor can start at the same address. With one rank, nothing is per rank.
    """

    def __init__(self) -> None:
        self._checked: set[str] = set()  # names that have passed the check for reserved names; grows
        self._structure: StateStructure | None = None  # of the last capture
        self._has_ended = False
        self.begin(0, 1)

    def release(self) -> None:
        """Release all tensors; the next capture does not follow the last one."""
        self.tensors: dict[str, torch.Tensor] = {}  # aliases of the rows that hold bytes, by name
        self.parameter_names: dict[int, str] = {}  # id of a live parameter -> its first name
        self.live: list[torch.Tensor] = []
        self._names: list[str] = []
        self._roles: list[Role] = []
        self._tied: dict[str, str] = {}  # name of a row -> that of the row that holds its bytes
        self._composites: dict[str, tuple[torch.Tensor, list[str]]] = {}  # parameters, with inner names
        self._has_sharded = False
        self._aliases: list[torch.Tensor] = []
        self._owners: list[list[torch.Tensor]] = []  # parameters of each optimizer
        self._types: list[type] = []
        self._dtypes: list[torch.dtype] = []
        self._may_be_reread: list[bool] = []
        self._specs: list[Any] = []  # specs of DTensors, by row
        self._layouts: list[ShardLayout | None] = []  # None for plain tensors
        self._shapes: list[tuple[int, ...]] = []  # of the whole tensors
        self._row_of: dict[str, int] = {}
        self._named: dict[int, str] = {}  # id of a sharded tensor -> name
        self._per_rank: set[str] = set()
        self._at: dict[int, list[str]] = {}  # address -> tensors that start there

    def begin(self, rank: int, world_size: int) -> TensorTable:
        """Begin a capture, and return the table. An earlier one that has failed is not followed."""
        if not self._has_ended or (self._rank, self._world_size) != (rank, world_size):
            self.release()
        self._rank, self._world_size, self._has_ended = rank, world_size, False
        self._row = 0  # all before it are confirmed
        self._confirmed: list[str] = []  # names of composite parameters
        self.has_new_memory = False  # of a tensor that was added or replaced another one
        self._has_new_facts = False
        return self

    def collect(self, name: str, tensor: torch.Tensor, role: Role) -> None:
        """Collect a tensor."""
        if self._row < len(self._names) and not self._confirm(name, tensor, role):
            self._begin_again()
        if self._row == len(self._names):
            self._add(name, tensor, role)
        self._row += 1

    def collect_all(self, names: list[str], roles: list[Role], tensors: list[torch.Tensor]) -> bool:
        """Collect several tensors; return False, and collect none, if one of them is composite.

        Quick if they are the objects of the previous capture.
        """
        if self._are_same(names, roles, tensors):
            self._row += len(names)
            return True
        if any(map(is_composite, tensors)):
            return False
        for name, role, tensor in zip(names, roles, tensors, strict=True):
            self.collect(name, tensor, role)
        return True

    def extract(self, value: Any, name: str, role: Role, **options: bool) -> Any:
        """Return a tree whose tensors are collected with one role; see `Extraction`."""
        own = role._replace(replication=Replication.PER_RANK, follows=None)
        walk = Extraction(
            lambda path, tensor: self.collect(path, tensor, role),
            per_rank=lambda path, tensor: self.collect(path, tensor, own),
            **options,
        )
        return walk.extract(value, name)

    def encode(self, value: Any, name: str, role: Role, **options: bool) -> Any:
        """Collect the tensors of a value with one role, and return its encoded tree."""
        return encode(self.extract(value, name, role, **options), name)

    def encode_composite(self, name: str, tensor: torch.Tensor, role: Role) -> Any:
        """Collect the inner tensors of a composite tensor, and return its encoded description."""
        inner = role._replace(is_named=False, is_inner=role.is_named)
        tree = self.extract(tensor, name, inner, named_types=True)
        if role.is_named:
            names, known = list(references(tree)), self._composites.get(name)
            if known is not None and not (known[0] is tensor and known[1] == names):
                self._begin_again()
            if name not in self._composites:
                self._name_composite(name, tensor, names)
            self._confirmed.append(name)
        return encode(tree, name)

    def captured(
        self,
        values: dict[str, Any],
        agreement: HolderAgreement,
        owners: list[list[torch.Tensor]],
        lent: Iterable[torch.Tensor],
        *,
        is_frozen_known: bool,
    ) -> CapturedState:
        """Return the collected tensors with the encoded values by top-level key.

        `owners` are the parameters of each optimizer; frozen tensors are known if these are all of the state.
        What is in the memory of `lent` tensors is changed only by an optimizer's steps too.
        """
        if [[*map(id, one)] for one in owners] != [[*map(id, one)] for one in self._owners]:
            self._owners, self._has_new_facts = owners, True
        if self.end() or self._structure is None:
            known, self._structure = self._structure, None  # after an error the next capture looks again
            new = self._find_structure(agreement, lent, is_frozen_known=is_frozen_known)
            self._structure = new if known is None or known != new else known
        # A copy: a later capture may put new tensors into the table.
        return CapturedState(dict(self.tensors), values, self._structure)

    def end(self) -> bool:
        """End the walk. Return True if any fact about the tensors may have changed since the last one."""
        if (self._row, len(self._confirmed)) != (len(self._names), len(self._composites)):
            self._begin_again()
        self._has_ended = True
        return self._has_new_facts

    def _confirm(self, name: str, tensor: torch.Tensor, role: Role) -> bool:
        """Return True if the next row has this name, role and tensor, or one that this one may replace."""
        row = self._row
        if (self._names[row], self._roles[row]) != (name, role):
            return False
        part = self._part(row, tensor)
        if self._is_same(row, tensor, part):
            if self._layouts[row] is None:  # a sharded tensor is found by the id of its object
                self.live[row] = tensor  # another object of this memory has a counter of writes of its own
            return True
        if not is_savable(part) or not self._can_replace(row, tensor, part):
            return False
        self._replace(row, tensor, part)
        return True

    def _begin_again(self) -> None:
        """Keep only the confirmed rows, and search for ties among them again."""
        self.has_new_memory = self._has_new_facts = True
        rows = list(zip(self._names, self.live, self._roles, strict=True))[: self._row]
        composites = [(name, *self._composites[name]) for name in self._confirmed]
        owners = self._owners
        self.release()
        self._owners = owners
        for row in rows:
            self._add(*row)
        for composite in composites:
            self._name_composite(*composite)

    def _add(self, name: str, tensor: torch.Tensor, role: Role) -> None:
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
        self.has_new_memory = self._has_new_facts = True
        is_here = layout is None or self._rank in layout.holders
        holder = self._place(name, tensor, local, layout) if is_here else name
        # Also for tensors without gradient: the live tensor itself would always equal itself.
        alias = local.detach()
        if holder != name:
            self._tied[name] = holder
        elif is_here:
            self.tensors[name] = alias
            is_own = role.replication is Replication.OWN and layout is None
            if self._world_size > 1 and (is_own or role.replication is Replication.PER_RANK):
                self._per_rank.add(name)
        self._row_of[name] = len(self._names)
        if role.is_named:
            self.parameter_names.setdefault(id(tensor), name)
        self._names.append(name)
        self._roles.append(role)
        self.live.append(tensor)
        self._aliases.append(alias)
        self._types.append(type(tensor))
        self._dtypes.append(local.dtype)
        self._may_be_reread.append(may_be_reread(local))
        self._specs.append(_spec(tensor))
        self._layouts.append(layout)
        self._shapes.append(tuple(local.shape) if layout is None else shape_of(tensor))
        self._has_sharded = self._has_sharded or local is not tensor

    def _name_composite(self, name: str, tensor: torch.Tensor, inner: list[str]) -> None:
        """Record a parameter that is a composite tensor, after the rows of its inner tensors."""
        self._has_new_facts = True
        self._composites[name] = tensor, inner
        self.parameter_names.setdefault(id(tensor), name)

    def is_per_rank(self, name: str) -> bool:
        """Return True if each rank has its own tensor under `name`."""
        return any(self._tied.get(row, row) in self._per_rank for row in self._rows_of(name))

    def _rows_of(self, name: str) -> list[str]:
        """Return the names of the rows that a parameter is saved in."""
        return self._composites[name][1] if name in self._composites else [name]

    def _holders_of(self, names: Iterable[str]) -> set[str]:
        """Return the names that hold the bytes of some rows on this rank."""
        return {self._tied.get(name, name) for name in names} & self.tensors.keys()

    def _find_structure(
        self, agreement: HolderAgreement, lent: Iterable[torch.Tensor], *, is_frozen_known: bool
    ) -> StateStructure:
        """Return all facts about the tensors; see `captured`."""
        shardings: dict[str, Sharding] = {}
        lowest: dict[str, ShardLayout] = {}
        places: dict[str, dict[Region, Region]] = {}
        for name in self.tensors:
            row = self._row_of[name]
            role, raw, shape = self._roles[row], self._layouts[row], self._shapes[row]
            if name not in self._per_rank:
                layout = self._layout(row, agreement)
                shardings[name] = Sharding(shape, layout)
            if role.replication is Replication.LOWEST and raw is None:
                lowest[name] = agreement.layout(name, raw, is_lowest=False, in_module=role.in_module)
            if raw is not None and raw.is_own:
                places[name] = dict(zip(raw.regions_of(self._rank, shape), raw.places, strict=True))
        roles, owned = list(zip(self._names, self._roles, strict=True)), self._owned(lent)
        frozen: set[str] = set()  # module parameters that no optimizer owns
        if is_frozen_known and self._owners:
            of_modules = (n for n, role in roles if (role.is_named or role.is_inner) and role.in_module)
            frozen = self._holders_of(of_modules).difference(owned, self._per_rank)
        temporary = (name for name, role in roles if role.is_temporary)
        return StateStructure(
            rows=[(name, one.dtype, one.shape, one.device) for name, one in self.tensors.items()],
            shardings=shardings,
            per_rank=frozenset(self._per_rank),
            owned=owned,
            temporary=frozenset(self._tied.get(name, name) for name in temporary),
            frozen=frozenset(frozen),
            tied=dict(self._tied),
            lowest=lowest,
            places=places,
        )

    def _owned(self, lent: Iterable[torch.Tensor]) -> frozenset[str]:
        """Return the names of the tensors that only a step of an optimizer changes."""
        rows = [name for name, role in zip(self._names, self._roles, strict=True) if role.is_owned]
        for parameter in chain.from_iterable(self._owners):
            if (name := self.parameter_names.get(id(parameter))) is not None:
                rows += self._rows_of(name)
        for local in map(local_of, lent):
            address = local.data_ptr()
            names = self._at.get(address, ()) if address else ()
            rows += [name for name in names if _is_within(self.tensors.get(name), local)]
        return frozenset(self._holders_of(rows))

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
        regions = () if layout.is_own else layout.regions_of(self._rank, shape_of(tensor))
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
        role, raw = self._roles[row], self._layouts[row]
        follows = None if role.follows is None else self._rows_of(role.follows)[0]
        if follows is not None and follows in self._row_of:
            parameter = self._row_of[self._tied.get(follows, follows)]
            own = self._layouts[parameter]
            is_shard = own is not None and own.is_own and own.regions is not None
            if is_shard and raw is None and self._shapes[row]:
                raise unsavable(self._aliases[row], self._names[row], _UNKNOWN_PART)
            return agreement.follow(raw, self._layout(parameter, agreement), own)
        is_lowest = role.replication is Replication.LOWEST
        known = agreement.layout(self._names[row], raw, is_lowest=is_lowest, in_module=role.in_module)
        if raw is None or not raw.is_own:
            return known
        shape = self._shapes[row]
        # Shards that have changed since the ranks met: a commit checks that all ranks' shards fit together.
        mine = set(raw.regions_of(self._rank, shape))
        return known if set(known.regions_of(self._rank, shape)) == mine else raw

    def _is_same(self, row: int, tensor: torch.Tensor, part: torch.Tensor) -> bool:
        """Return True if a tensor shows a row's memory alike; a parameter must be the same object."""
        return (
            type(tensor) is self._types[row]
            and (tensor is self.live[row] or not self._roles[row].is_named)
            and shows_same_memory(part, self._aliases[row])
            and self._has_same_sharding(row, tensor)
        )

    def _are_same(self, names: list[str], roles: list[Role], tensors: list[torch.Tensor]) -> bool:
        """Return True if the next rows have these objects, showing the same memory."""
        row = self._row
        at = slice(row, row + len(names))
        live, chosen = self.live[at], self._may_be_reread[at]
        is_same = (
            self._names[at] == names
            and self._roles[at] == roles
            and len(tensors) == len(live)
            # Loops without the interpreter and without lists: this runs for every tensor at every save.
            and all(map(operator.is_, tensors, live))
            and all(map(operator.is_, map(type, tensors), self._types[at]))
        )
        if not is_same:
            return False
        if self._has_sharded:
            if not all(map(self._has_same_sharding, range(row, row + len(names)), tensors)):
                return False
            tensors = list(map(self._part, range(row, row + len(names)), tensors))
        return (
            all(map(operator.is_, map(_get_dtype, tensors), self._dtypes[at]))
            and show_same_memory(tensors, self._aliases[at])
            and all(map(shows_same_memory, compress(tensors, chosen), compress(self._aliases[at], chosen)))
        )

    def _part(self, row: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that the row saves."""
        is_whole = self._layouts[row] is None and type(tensor) in PLAIN
        return tensor if is_whole else local_of(tensor)

    def _has_same_sharding(self, row: int, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` has the row's global shape and sharding."""
        spec, layout = self._specs[row], self._layouts[row]
        if layout is None:
            return self._roles[row].replication is Replication.PER_RANK or not is_local_shard(tensor)
        if spec is not None and spec is _spec(tensor):
            return True
        new = layout_of(tensor)
        is_same = new is not None and (new, new.places) == (layout, layout.places)
        return is_same and shape_of(tensor) == self._shapes[row]

    def _can_replace(self, row: int, tensor: torch.Tensor, part: torch.Tensor) -> bool:
        """Return True if a tensor can replace a row's without affecting any other row."""
        name, old, new = self._names[row], self._aliases[row].data_ptr(), part.data_ptr()
        return (
            not self._roles[row].is_named
            and name in self.tensors
            and (type(tensor) is self._types[row] or (type(tensor) in PLAIN and self._types[row] in PLAIN))
            and self._has_same_sharding(row, tensor)
            and (
                self._layouts[row] is None
                or (id(tensor) not in self._named and part.shape == self._aliases[row].shape)
            )
            and name not in self._tied
            and name not in self._tied.values()
            and not (old and len(self._at[old]) > 1)
            and not (new and new in self._at)
        )

    def _replace(self, row: int, tensor: torch.Tensor, part: torch.Tensor) -> None:
        """Replace a row's tensor."""
        name, old, alias = self._names[row], self._aliases[row], part.detach()
        if self._layouts[row] is not None:
            self._named.pop(id(self.live[row]), None)
            self._named[id(tensor)] = name
        if old.data_ptr():
            del self._at[old.data_ptr()]
        self._at.setdefault(alias.data_ptr(), [name])
        self.live[row], self._aliases[row], self.tensors[name] = tensor, alias, alias
        self._shapes[row] = tuple(alias.shape) if self._layouts[row] is None else shape_of(tensor)
        self._types[row], self._dtypes[row], self._specs[row] = type(tensor), part.dtype, _spec(tensor)
        self._may_be_reread[row] = may_be_reread(part)
        self.has_new_memory = True
        if (old.dtype, old.shape, old.device) != (alias.dtype, alias.shape, alias.device):
            self._has_new_facts = True


def _spec(tensor: torch.Tensor) -> Any:
    """Return a DTensor's spec, or None. A changed DTensor has another spec."""
    return getattr(tensor, "_spec", None) if type(tensor) not in PLAIN else None


def _is_within(found: torch.Tensor | None, owned: torch.Tensor) -> bool:
    """Return True if a tensor lies in the memory of the owned one."""
    if found is None or found.device != owned.device:
        return False
    is_dense = found.is_contiguous() and owned.is_contiguous() and found.nbytes <= owned.nbytes
    return is_dense or is_same_view(found, owned)


class TensorLister(TensorTable):
    """Lists the tensors of entries, also those that cannot be saved, such as on meta. Values are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[tuple[str, torch.Tensor, Role]] = []

    @override
    def collect(self, name: str, tensor: torch.Tensor, role: Role) -> None:
        self.listed.append((name, tensor, role))

    @override
    def encode(self, value: Any, name: str, role: Role, **options: bool) -> Any:
        return None
