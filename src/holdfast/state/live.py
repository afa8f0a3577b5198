"""State: the live training objects by key; what a save takes from them and how a load fills them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from holdfast.errors import InvalidInput, Unsupported
from holdfast.format.manifest import Tensor
from holdfast.state import rng
from holdfast.state.agreement import Agreement, Gather, Inventory, Known, agree
from holdfast.state.capture import Captured, Sink
from holdfast.state.entry import Entry
from holdfast.state.flat import FlatModuleEntry, FlatOptimizerEntry, is_flat
from holdfast.state.load import Load, Phase, Plan, leftover, mismatch, renamer
from holdfast.state.modules import ModuleEntry
from holdfast.state.objects import (
    GeneratorEntry,
    StatefulEntry,
    TensorEntry,
    ValueEntry,
    is_generator,
    is_stateful,
)
from holdfast.state.optimizers import OptimizerEntry, has_step_hooks, is_plain, parameters
from holdfast.state.review import Doubt, find_doubts
from holdfast.state.sharding import Layout, layout_of
from holdfast.state.spread import Marked, Spread
from holdfast.state.table import Structure, Table
from holdfast.state.tensors import refuse
from holdfast.state.tree import graft, references

_FIRST = (ModuleEntry, FlatModuleEntry, TensorEntry)
_PLAIN_OPTIMIZERS = (OptimizerEntry, FlatOptimizerEntry)


class State:
    """The training objects that a checkpoint holds, by top-level key.

    Args:
        objects: modules, optimizers, anything with state_dict() and load_state_dict(), tensors, random
            number generators, plain values and containers of these. The mapping itself is kept: an object
            that is put into it later is saved from then on, and plain values are restored into it.
        world: this rank and how many save together; by default as torch.distributed says it.

    Raises:
        InvalidInput: a key or a value that cannot be saved, named by its key path.
        Unsupported: a kind of tensor or module that this version cannot save.
    """

    def __init__(self, objects: MutableMapping[str, Any], *, world: tuple[int, int] | None = None) -> None:
        self._objects = objects
        self._given_world = world
        self._entries: dict[str, Entry] = {}
        self._checked: set[str] = set()
        self._table: Table | None = None  # what the capture before found
        self._structure: Structure | None = None
        self._agreement: Agreement | None = None
        rank, world_size = self._world()
        for key, entry in self._current().items():
            if isinstance(entry, ModuleEntry) and entry.has_meta():
                continue  # it is there to be restored
            if isinstance(entry, (ValueEntry, GeneratorEntry, ModuleEntry, TensorEntry)):
                _capture(key, entry, Sink(rank, world_size, self._checked))

    def agree(self, gather: Gather) -> None:
        """Let the ranks tell each other who holds which tensor; from then on captures and loads know it.

        Needed where ranks hold different things: pipeline stages, and tensor parallelism or sharding on one
        part of the ranks beside another. Without it, every rank takes all others to be like itself. If all
        ranks have the same, only a digest is exchanged. A tensor that appears later is held as
        `Agreement` says; call it again when modules have been added on some of the ranks.

        Args:
            gather: answers the values of all ranks, by rank; not called if this rank is alone.

        Raises:
            InvalidInput: two ranks have different tensors under one name.

        Ranks: collective.
        Blocks: on `gather`.
        """
        rank, world_size = self._world()
        self._agreement = agree(self._inventory(), rank, world_size, gather)
        self._table = None  # what is known of a structure has changed

    def _inventory(self) -> Inventory:
        """What this rank tells the others: its tensors, also those on meta, as far as modules have them."""
        tensors: dict[str, Known] = {}
        others: set[str] = set()
        entries = self._current()
        for entry in entries.values():
            for name, tensor, role in entry.named_tensors():
                layout = None if role.spread is Spread.PER_RANK else _layout(name, tensor)
                if layout is None and role.spread in (Spread.PER_RANK, Spread.OWN):
                    others.add(name)
                elif layout is None or self._world()[0] in layout.holders:
                    tensors[name] = Known(str(tensor.dtype), tuple(tensor.shape), layout)
        return Inventory(frozenset(entries), tensors, frozenset(others))

    def capture(self) -> Captured:
        """All tensors and values of the state at this moment, the process-wide RNG states included.

        Tensors are not copied: they must be, before anything changes them. The memory of all of them stays
        taken until the next capture or load, also if training lets go of it.

        Raises:
            InvalidInput: a value that cannot be saved, or two tensors with one name.
            Unsupported: a kind of tensor that cannot be saved.

        Ranks: not collective by itself; a user's state_dict() may be, and that of FSDP1 is.
        """
        entries = self._current()
        sink = Sink(*self._world(), self._checked, self._table)
        captured = {key: _capture(key, entry, sink) for key, entry in _ordered(entries)}
        for optimizer in self._hooked(entries):
            sink.own(parameters(optimizer))
        values = {key: captured[key] for key in entries}
        values[rng.KEY] = rng.capture(sink)
        captured_now = sink.captured(
            values, self._structure, self._agreed(), is_frozen_known=_are_all_hooked(entries)
        )
        self._table, self._structure = sink.table, captured_now.structure
        return captured_now

    def review(self) -> list[Doubt]:
        """Return what of the state will not resume exactly; see `find_doubts`."""
        return find_doubts({key: entry.value for key, entry in self._current().items()})

    def forget(self) -> None:
        """Let go of the memory of what was captured last, which else stays taken until the next capture."""
        self._table, self._entries = None, {}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose next step may change tensors that `Captured.owned` names."""
        return self._hooked(self._current())

    def marks(self) -> object:
        """Return a value that differs from an earlier one if training has changed the state since.

        Empty where `optimizers` has all optimizers: these are better counted as they step. Else it is made of
        the version counters of what the others train; without any optimizer, of those of all tensors and of
        all plain values. Objects with a state_dict() are not asked.
        """
        entries = self._current()
        found = [entry.value for entry in entries.values() if isinstance(entry.value, torch.optim.Optimizer)]
        if found:
            own = [one for one in found if not has_step_hooks(one) and hasattr(one, "param_groups")]
            return tuple(_version(tensor) for one in own for tensor in parameters(one))
        sink = Sink(*self._world(), self._checked)
        kinds = (ModuleEntry, TensorEntry, ValueEntry)
        values = {key: _capture(key, one, sink) for key, one in entries.items() if isinstance(one, kinds)}
        return values, [(tensor.data_ptr(), _version(tensor)) for tensor in sink.table.tensors.values()]

    def load(
        self,
        tensors: Mapping[str, Tensor],
        tied: Mapping[str, str],
        values: Mapping[str, Any],
        *,
        others: Sequence[Mapping[str, Any]] = (),
        strict: bool = True,
        only: Collection[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        own_rank: bool = True,
    ) -> Load:
        """Plan how the live state is filled from a checkpoint. Nothing live is changed.

        Args:
            tensors: the checkpoint's tensors by name.
            tied: its aliases.
            values: encoded values of the part that is chosen for this rank.
            others: encoded values of further parts, one of each other structure in the checkpoint: what
                other pipeline stages had. Parameters that are not in `values` are looked up in these.
            strict: refuse names that only one side has; else they are listed in the plan and left alone.
                What only other ranks hold now (see `agree`) is not counted.
            only: top-level keys (live names) to restore; all of them by default.
            rename: saved names to live names: a mapping of prefixes, or a function. Applies to names of
                tensors, of top-level keys and of parameters inside an optimizer's state.
            own_rank: `values` were saved by this very rank; else RNG states are not restored but seeds are
                derived from them, so that no two ranks draw the same numbers.

        Raises:
            InvalidInput: the state and the checkpoint do not fit each other.
            Unsupported: a dtype or kind of tensor that cannot be restored here.

        Ranks: not collective by itself; FSDP1 is, and a user's state_dict() may be: where tensors may be
            sharded it is asked what it has as a DTensor.
        """
        self._table = None  # a load replaces tensors: it must not find the memory of the old ones taken
        entries = self._current()
        wanted = self._wanted(only)
        plan = Plan(tensors, tied, values, renamer(rename), others=others, rank=self._world()[0])
        for key, entry in _ordered(entries):
            if wanted is None or key in wanted:
                entry.plan(plan, lambda value, key=key: self._objects.__setitem__(key, value))
        if wanted is None or rng.KEY in wanted:
            _plan_rng(plan, *self._world(), own_rank=own_rank)
        agreement = self._agreed()
        held = (agreement.names, agreement.keys) if not agreement.is_alike else None
        extra = leftover(plan, [*entries, rng.KEY], wanted, held)
        if strict and (plan.missing or extra):
            raise mismatch(plan.missing, extra)
        return Load(plan, extra)

    def _wanted(self, only: Collection[str] | None) -> set[str] | None:
        if only is None:
            return None
        chosen = {only} if isinstance(only, str) else set(only)
        if unknown := sorted(chosen - set(self._objects) - {rng.KEY}):
            message = f"only= names {unknown}, which the state does not have; it has {sorted(self._objects)}."
            raise InvalidInput(message, key=unknown[0])
        return chosen

    def _current(self) -> dict[str, Entry]:
        """The entries of the mapping as it is now; those of objects that are still there are kept."""
        entries: dict[str, Entry] = {}
        self._marked: dict[str, tuple[int, ...]] = {}
        for key, marked in self._objects.items():
            if isinstance(marked, Marked) and marked.ranks is not None:
                self._marked[key] = marked.ranks
            value, spread = (marked.value, marked.spread) if isinstance(marked, Marked) else (marked, None)
            known = self._entries.get(key)
            if known is None or known.value is not value or known.spread is not spread or _is_stale(known):
                _check_key(key)
                known = self._classify(key, value, spread)
            entries[key] = known
        self._entries = entries
        return entries

    def _classify(self, key: str, value: Any, spread: Spread | None) -> Entry:
        if isinstance(value, torch.nn.Module):
            return FlatModuleEntry(key, value, spread) if is_flat(value) else ModuleEntry(key, value, spread)
        if isinstance(value, torch.optim.Optimizer) and has_step_hooks(value) and is_plain(value):
            flat = self._flat_module_of(value)
            if flat is not None:
                return FlatOptimizerEntry(key, value, spread, flat)
            return OptimizerEntry(key, value, spread, self._parameter_names)
        if isinstance(value, torch.Tensor):
            return TensorEntry(key, value, spread)
        if is_generator(value):
            return GeneratorEntry(key, value, spread)
        if is_stateful(value) and not isinstance(value, type):
            return StatefulEntry(key, value, spread)
        return ValueEntry(key, value, spread)

    def _flat_module_of(self, optimizer: torch.optim.Optimizer) -> FlatModuleEntry | None:
        """The entry of the FSDP1 module whose parameters an optimizer has, if it has any."""
        owned = set(map(id, parameters(optimizer)))
        for key, marked in self._objects.items():
            value = marked.value if isinstance(marked, Marked) else marked
            if not isinstance(value, torch.nn.Module) or not is_flat(value):
                continue
            if not owned.isdisjoint(map(id, value.parameters())):
                return FlatModuleEntry(key, value, marked.spread if isinstance(marked, Marked) else None)
        return None

    def _parameter_names(self) -> dict[int, str]:
        """Names of all live parameters of the state by id, also of those on meta."""
        names: dict[int, str] = {}
        for entry in self._entries.values():
            if isinstance(entry, ModuleEntry):
                for name, tensor, role in entry.named_tensors():
                    if role.is_named:
                        names.setdefault(id(tensor), name)
        for entry in self._entries.values():
            if isinstance(entry, TensorEntry) and isinstance(entry.value, torch.nn.Parameter):
                names.setdefault(id(entry.value), entry.key)
        return names

    def _agreed(self) -> Agreement:
        """What the ranks have agreed on, or that all are alike, with what the user has said."""
        rank, world_size = self._world()
        agreed = self._agreement
        if agreed is None or (agreed.rank, agreed.world_size) != (rank, world_size):
            agreed = Agreement(rank, world_size)
        return dataclasses.replace(agreed, marked=self._marked) if self._marked else agreed

    def _world(self) -> tuple[int, int]:
        return self._given_world or _world()

    def _hooked(self, entries: Mapping[str, Entry]) -> list[torch.optim.Optimizer]:
        values = [entry.value for entry in entries.values()]
        return [v for v in values if isinstance(v, torch.optim.Optimizer) and has_step_hooks(v)]


def _capture(key: str, entry: Entry, sink: Sink) -> Any:
    try:
        return entry.capture(sink)
    except RecursionError as error:
        raise InvalidInput(f"{key} contains itself, or is too deeply nested.", key=key) from error


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _layout(name: str, tensor: torch.Tensor) -> Layout | None:
    try:
        return layout_of(tensor)
    except Unsupported as error:
        raise refuse(tensor, name, str(error)) from error


def _are_all_hooked(entries: Mapping[str, Entry]) -> bool:
    """True if no optimizer keeps to itself which parameters it trains."""
    optimizers = [e.value for e in entries.values() if isinstance(e.value, torch.optim.Optimizer)]
    return all(map(has_step_hooks, optimizers))


def _ordered(entries: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """Modules and tensors first: optimizers name their state after them."""
    return sorted(entries.items(), key=lambda pair: not isinstance(pair[1], _FIRST))


def _is_stale(entry: Entry) -> bool:
    """True if an optimizer has got or lost hooks that decide how it is saved."""
    value = entry.value
    if not isinstance(value, torch.optim.Optimizer) or not has_step_hooks(value):
        return False
    return is_plain(value) is not isinstance(entry, _PLAIN_OPTIMIZERS)


def _check_key(key: Any) -> None:
    if not isinstance(key, str) or not key or key == rng.KEY or "/" in key or "@" in key:
        message = (
            f"{key!r} cannot be a key of the state: keys are non-empty strings without '/' and '@', and "
            f"{rng.KEY!r} is kept for the random number generators."
        )
        raise InvalidInput(message, key=str(key))


def _plan_rng(plan: Plan, rank: int, world_size: int, *, own_rank: bool) -> None:
    tree = plan.values(rng.KEY)
    if tree is None:
        plan.notes.append("rng: the checkpoint has no generator states; the present ones stay.")
        return
    for name in references(tree):
        plan.fresh(name)

    def finish() -> None:
        values = graft(tree, plan.tensor)
        if own_rank:
            plan.notes.extend(rng.restore(values))
        else:
            plan.notes.append(rng.derive(values, rank=rank, world_size=world_size))

    plan.do(Phase.RNG, finish)


def _world() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
