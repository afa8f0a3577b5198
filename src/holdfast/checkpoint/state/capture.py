"""Captured states: live tensors and values by name, the collectors that find them, and their catalogs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from typing_extensions import override

from holdfast.checkpoint.copies import SharedTensor
from holdfast.checkpoint.format.catalog import Catalog, Tensor
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Partitioning
from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.state.entry import Replication
from holdfast.checkpoint.state.holders import HolderAgreement
from holdfast.checkpoint.state.sharding import Sharding, ShardLayout
from holdfast.checkpoint.state.tensor_table import Role, StateStructure, TensorTable
from holdfast.checkpoint.state.tensors import NAMES, is_composite, is_savable
from holdfast.checkpoint.state.tree import Extraction, references


class CapturedState(Struct, frozen=True):
    """A state at one moment: its tensors still live, its values already encoded.

    `tensors` are detached and share memory with the training objects; of tied tensors only the first is
    included. A sharded tensor appears as this rank's part, perhaps empty; a rank outside a tensor's mesh does
    not list it. The order is the same on every rank whose state has the same structure.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]  # top-level key -> tagged JSON, with {"$tensor": name} for tensors
    structure: StateStructure  # the same object as in the previous capture if no fact in it has changed


class TensorCollector:
    """Collects tensors by name while a state is walked.

    It follows the table of the previous capture as long as the same tensors come in the same order, which
    costs one comparison each. At the first difference it starts a new table, and searches for ties again.
    """

    def __init__(
        self, rank: int, world_size: int, checked: set[str], followed: TensorTable | None = None
    ) -> None:
        is_usable = followed is not None and (followed.rank, followed.world_size) == (rank, world_size)
        self._followed = followed if is_usable else None
        self._new_table = TensorTable(rank, world_size, checked)
        self._row = 0  # of the table that is followed: all before it are confirmed
        self._composites: list[str] = []  # of the table that is followed: names that are confirmed
        self.replaced: dict[int, torch.Tensor] = {}  # row -> the tensor that stands there now
        self._replaced_at: set[int] = set()  # their addresses

    @property
    def table(self) -> TensorTable:
        """The table in use: the followed one, or the new one."""
        return self._followed or self._new_table

    def collect(self, name: str, tensor: torch.Tensor, role: Role) -> None:
        """Collect a tensor."""
        if self._followed is not None:
            if self._confirm(self._followed, name, tensor, role):
                self._row += 1
                return
            self._leave(self._followed)
        self._new_table.add(name, tensor, role)

    def collect_all(self, names: list[str], roles: list[Role], tensors: list[torch.Tensor]) -> bool:
        """Collect several tensors; return False, and collect none, if one of them is composite.

        Quick if they are the objects of the previous capture.
        """
        if self._followed is not None and self._followed.are_same(self._row, names, roles, tensors):
            self._row += len(names)
            return True
        if any(map(is_composite, tensors)):
            return False
        for name, role, tensor in zip(names, roles, tensors, strict=True):
            self.collect(name, tensor, role)
        return True

    def name_composite(self, name: str, tensor: torch.Tensor, inner: list[str]) -> None:
        """Record a parameter that is a composite tensor, with the names of its inner tensors."""
        if self._followed is not None:
            if self._followed.has_composite(name, tensor, inner):
                self._composites.append(name)
                return
            self._leave(self._followed)
        self._new_table.name_composite(name, tensor, inner)

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
            self.name_composite(name, tensor, list(references(tree)))
        return encode(tree, name)

    def captured(
        self,
        values: dict[str, Any],
        structure: StateStructure | None,
        agreement: HolderAgreement,
        owners: Sequence[list[torch.Tensor]],
        *,
        is_frozen_known: bool,
    ) -> CapturedState:
        """Return the collected tensors with the encoded values by top-level key.

        `structure` is that of the previous capture, made by the same agreement; it is kept if it still holds.
        `owners` are the parameters of each optimizer; frozen tensors are known if these are all of the state.
        """
        is_kept = self.end(owners)
        if structure is None or not is_kept:
            new = self.table.structure(agreement, is_frozen_known=is_frozen_known)
            structure = structure if structure is not None and structure.has_same_facts(new) else new
        # A copy: a later capture may put new tensors into the table.
        return CapturedState(dict(self.table.tensors), values, structure)

    def end(self, owners: Sequence[list[torch.Tensor]] = ()) -> bool:
        """End the walk. Return True if the followed table holds, with tensors replaced by like ones."""
        if (table := self._followed) is not None:
            are_all = (self._row, len(self._composites)) == (len(table.names), len(table.composites))
            if are_all and [[*map(id, one)] for one in owners] == [[*map(id, one)] for one in table.owners]:
                changes = [table.replace(row, tensor) for row, tensor in self.replaced.items()]
                return not any(changes)
            self._leave(table)
        for parameters in owners:
            self._new_table.own(parameters)
        return False

    def _confirm(self, table: TensorTable, name: str, tensor: torch.Tensor, role: Role) -> bool:
        """Return True if the next row has this name, role and tensor, or one that may be replaced by it."""
        row = self._row
        if row >= len(table.names) or (table.names[row], table.roles[row]) != (name, role):
            return False
        part = table.part(row, tensor)
        if table.is_same(row, tensor, part):
            table.note_object(row, tensor)
            return True
        if not is_savable(part) or not table.can_replace(row, tensor, part):
            return False
        address = part.data_ptr()
        if address and address in self._replaced_at:
            return False
        self._replaced_at.add(address)
        self.replaced[row] = tensor
        return True

    def _leave(self, table: TensorTable) -> None:
        """Copy the confirmed rows into the new table, and continue with that one."""
        self._followed = None
        for row in range(self._row):
            live = self.replaced.get(row, table.live[row])
            self._new_table.add(table.names[row], live, table.roles[row])
        for name in self._composites:
            self._new_table.name_composite(name, *table.composites[name])


class TensorLister(TensorCollector):
    """Lists the tensors of entries, also those that cannot be saved, such as on meta. Values are left out."""

    def __init__(self) -> None:
        super().__init__(0, 1, set())
        self.rows: list[tuple[str, torch.Tensor, Role]] = []

    @override
    def collect(self, name: str, tensor: torch.Tensor, role: Role) -> None:
        self.rows.append((name, tensor, role))

    @override
    def encode(self, value: Any, name: str, role: Role, **options: bool) -> Any:
        return None


def assign(sizes: Mapping[str, int], shardings: Mapping[str, Sharding]) -> dict[str, Partitioning]:
    """Choose which copy of each tensor is written, so that ranks write evenly by bytes.

    Tensors whose copies are the same sets of ranks are distributed over these copies: the largest first, each
    to the copy with the fewest bytes so far. Names and the order of copies break ties, so the order of the
    mappings does not matter. A rank that also holds other tensors computes the same result for these. `sizes`
    are the bytes of each whole tensor. Equal partitionings are the same object.

    Ranks: not collective; every rank computes the same from the same arguments.
    Source: longest-processing-time-first scheduling, R. L. Graham, 1969.
    """
    by_layout: dict[int, list[tuple[str, ShardLayout]]] = {}
    for name, sharding in shardings.items():
        by_layout.setdefault(id(sharding.layout), []).append((name, sharding.layout))
    groups: dict[tuple[tuple[int, ...], ...], list[tuple[str, ShardLayout]]] = {}
    for members in by_layout.values():  # few: hashing a thousand ranks for each tensor would take long
        groups.setdefault(members[0][1].copies, []).extend(members)
    partitionings: dict[str, Partitioning] = {}
    for copies, members in groups.items():
        loads = [(0, copy) for copy in range(len(copies))]
        for name, layout in sorted(members, key=lambda member: (-sizes[member[0]], member[0])):
            num_bytes, copy = loads[0]
            partitionings[name] = layout.partitionings[copy]
            heapq.heapreplace(loads, (num_bytes + sizes[name], copy))
    return partitionings


def catalog_of(captured: CapturedState) -> Catalog:
    """Return the catalog of a captured state, without per-rank tensors.

    Ranks: not collective; ranks that hold the same tensors compute the same catalog, byte for byte.
    """
    structure, shardings = captured.structure, captured.structure.shardings
    dtypes = {name: NAMES[captured.tensors[name].dtype] for name in shardings}
    sizes = {name: math.prod(one.shape) * ITEM_BYTES[dtypes[name]] for name, one in shardings.items()}
    chosen = assign(sizes, shardings)
    held_by: dict[int, tuple[int, ...]] = {}  # by id of a layout: thousands of tensors share a few
    for sharding in shardings.values():
        if id(sharding.layout) not in held_by:
            held_by[id(sharding.layout)] = tuple(sorted(sharding.layout.holders))
    tensors = {
        name: Tensor(dtypes[name], one.shape, chosen[name], held_by[id(one.layout)], name in structure.frozen)
        for name, one in shardings.items()
    }
    return Catalog(tensors, dict(structure.tied))


def shared_tensors(captured: CapturedState, catalog: Catalog, rank: int) -> list[SharedTensor]:
    """Return the regions of tensors on this rank that other ranks hold too.

    Ranks: not collective; ranks that hold the same tensors find the same names.
    """
    numbers = {name: number for number, name in enumerate(catalog.tensors)}
    structure, found = captured.structure, list[SharedTensor]()
    for name, sharding in structure.shardings.items():
        layout = structure.lowest.get(name, sharding.layout)
        region, item_bytes = layout.region_number(rank), ITEM_BYTES[NAMES[captured.tensors[name].dtype]]
        num_bytes = -(-math.prod(sharding.shape) // len(layout.copies[0])) * item_bytes
        if len(layout.copies) > 1 and region is not None and num_bytes and name in numbers:
            is_trained = name in structure.owned
            found.append(SharedTensor(name, numbers[name], region, layout.copies, num_bytes, is_trained))
    return found
