"""State: the live training objects by key, captured for a save and filled by a load."""

from __future__ import annotations

import collections
import contextlib
import gc
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from msgspec.structs import replace

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.format.manifest import Tensor
from holdfast.checkpoint.format.nesting import insert, is_under, place_entries, placed_composites
from holdfast.checkpoint.format.values import NAMED_TYPES, contains_itself
from holdfast.checkpoint.state import rng
from holdfast.checkpoint.state.entry import (
    FoundEntry,
    Replication,
    Skippable,
    StateEntry,
    find_entries,
    is_follower,
    is_generator,
    is_skippable,
    is_stateful,
    is_stream,
)
from holdfast.checkpoint.state.fsdp1 import FSDP1ModuleEntry, FSDP1OptimizerEntry, is_fsdp1
from holdfast.checkpoint.state.holders import Gather, Held, HolderAgreement, agree, inventory
from holdfast.checkpoint.state.load import Load, LoadPhase, leftover, renamer
from holdfast.checkpoint.state.loader_watch import loader_doubts
from holdfast.checkpoint.state.modules import ModuleEntry
from holdfast.checkpoint.state.objects import GeneratorEntry, StatefulEntry, TensorEntry, ValueEntry
from holdfast.checkpoint.state.optimizers import (
    OptimizerEntry,
    has_step_hooks,
    is_plain,
    parameters,
    state_tensors,
    tensors_of,
)
from holdfast.checkpoint.state.review import ResumeRisk, find_resume_risks
from holdfast.checkpoint.state.sharding import layout_of, local_of, shape_of
from holdfast.checkpoint.state.tensor_table import CapturedState, TensorLister, TensorTable
from holdfast.checkpoint.state.tensors import PLAIN, find_read_only, may_be_sharded, unsavable, versions
from holdfast.checkpoint.state.tree import insert_tensors, references
from holdfast.errors import InvalidInput, ResumeWarning, Unsupported
from holdfast.system import units
from holdfast.system.callsite import warn

_PACKAGE = "deepspeed."
_CLASSES = {"DeepSpeedEngine": "an engine", "DeepSpeedOptimizer": "an optimizer"}
_WRAPPERS = "deepspeed.runtime.base_optimizer"
_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attributes of DeepSpeed's optimizers with the parameters that they overwrite in each step."""


def check_not_partitioned(key: str, value: Any) -> None:
    """Check that DeepSpeed does not keep a part of an object elsewhere."""
    if (reason := _reason(value)) is not None:
        raise Unsupported(
            f"{key} is {reason}. Nothing was written or loaded. Call attach(engine, home) of "
            "holdfast.adapters.deepspeed, and then engine.save_checkpoint() and engine.load_checkpoint(): "
            "they save and load all of it through Holdfast.",
            key=key,
        )


def may_be_partitioned(value: Any) -> bool:
    """Return True if DeepSpeed may have taken over an object since it was checked; cheap."""
    if _WRAPPERS not in sys.modules:
        return False
    if isinstance(value, torch.nn.Module):
        return _mark(value) is not None
    return isinstance(value, torch.optim.Optimizer) and not _trains_parameters(value)


def _reason(value: Any) -> str | None:
    for base in type(value).__mro__:
        if base.__module__.startswith(_PACKAGE) and base.__name__ in _CLASSES:
            return (
                f"{_CLASSES[base.__name__]} of DeepSpeed, which keeps its state in partitions of each rank; "
                "a Checkpointer would save only a part of it"
            )
    if _WRAPPERS not in sys.modules:
        return None
    if isinstance(value, torch.nn.Module):
        mark = _mark(value)
        if mark == "ds_id":
            return "a module under ZeRO 3, whose parameters are in partitions of each rank"
        if mark is not None or _is_overwritten(value):
            return (
                "a module whose weights an engine of DeepSpeed overwrites in each step from copies of its "
                "own; what a Checkpointer loads into the module would be lost"
            )
    if isinstance(value, torch.optim.Optimizer) and _is_wrapped(value):
        return (
            "an optimizer that was given to DeepSpeed, which has replaced its parameters by partitions or "
            "copies of its own; a Checkpointer would save the optimizer's state without them"
        )
    return None


def _mark(module: torch.nn.Module) -> str | None:
    """Return the name that ZeRO has given to a parameter of a module: of stage 3, else of 1 and 2."""
    parameters = list(module.parameters())
    marks = (name for name in ("ds_id", "_hp_mapping") if any(hasattr(one, name) for one in parameters))
    return next(marks, None)


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer of DeepSpeed uses this one."""
    if _trains_parameters(optimizer):
        return False  # DeepSpeed replaces all parameters by tensors of another class
    # The search does not find what `gc.freeze` has put aside.
    return gc.get_freeze_count() > 0 or any(vars(one).get("optimizer") is optimizer for one in _wrappers())


def _trains_parameters(optimizer: torch.optim.Optimizer) -> bool:
    groups: Iterable[dict[str, Any]] = getattr(optimizer, "param_groups", ())
    return any(isinstance(one, torch.nn.Parameter) for group in groups for one in group["params"])


def _is_overwritten(module: torch.nn.Module) -> bool:
    own = set(map(id, module.parameters()))
    groups = (vars(wrapper).get(name, ()) for wrapper in _wrappers() for name in _GROUPS)
    return any(id(one) in own for one in chain.from_iterable(chain.from_iterable(groups)))


def _wrappers() -> Iterator[Any]:
    """Yield all optimizers of DeepSpeed in this process; they have taken over those of torch."""
    kind: type = sys.modules[_WRAPPERS].DeepSpeedOptimizer
    for wrapper in gc.get_referrers(*_subclasses(kind)):
        if issubclass(type(wrapper), kind):
            yield wrapper


def _subclasses(kind: type) -> list[type]:
    return [kind, *chain.from_iterable(map(_subclasses, type.__subclasses__(kind)))]


_get_is_first = operator.attrgetter("is_first")
_PLAIN_OPTIMIZERS = (OptimizerEntry, FSDP1OptimizerEntry)
_DEEPSPEED = "deepspeed"
_numbers = count()


class State:
    """The training objects of a checkpoint, by top-level key.

    Args:
        objects: modules, optimizers, objects with state_dict() and load_state_dict(), tensors, random number
            generators, plain values and containers of these. The mapping itself is kept: objects that are
            added later are saved too, and plain values are restored into it. An object with a state of its
            own that is in a container is saved under its key path: "gan.g" in {"gan": {"g": module}}.
        world: this rank and the number of ranks that save together; by default from torch.distributed.
    """

    def __init__(self, objects: MutableMapping[str, Any], *, world: tuple[int, int] | None = None) -> None:
        self._objects = objects
        self._lent_optimizers: list[torch.optim.Optimizer] = []
        self.are_lent = False  # the objects are others for now, see `lent`
        self._given_world = world
        self._entries: dict[str, StateEntry] = {}
        self._found: dict[str, FoundEntry] = {}
        self._followers: list[Any] | None = None
        self._table = TensorTable()  # of the captures
        self._marked = TensorTable()  # of the marks
        self._memory_number = 0  # of its memory, different from that of any other state
        self._agreement: HolderAgreement | None = None
        for key, entry in self._current().items():
            if isinstance(entry, ModuleEntry) and entry.has_meta():
                continue  # it will be restored
            if isinstance(entry, (ValueEntry, GeneratorEntry, ModuleEntry, TensorEntry)):
                _capture({key: entry}, self._table.begin(*self._world()))
        self._table.release()

    def agree(self, gather: Gather) -> None:
        """Agree with all ranks on the holders of each tensor, for later captures and loads.

        Needed if ranks hold different things: pipeline stages, or tensor parallelism or sharding on some of
        the ranks. Without it, every rank assumes that all others are like itself. If all ranks have the same,
        only a digest is exchanged. A tensor that appears later is held as `HolderAgreement` describes; call
        this again after adding modules on some of the ranks.

        Ranks: collective.
        Blocks: on `gather`.
        """
        rank, world_size = self._world()
        self._agreement = agree(self._inventory(), rank, world_size, gather) if world_size > 1 else None
        if self._table.live:
            self._table.release()  # facts about the structure have changed

    def _inventory(self) -> dict[str, Any]:
        """Return the tensors that this rank announces to the others, also those on meta."""
        tensors: dict[str, Held] = {}
        others: set[str] = set()
        entries, listed = self._current(), TensorLister()
        for entry in entries.values():
            if isinstance(entry, (ModuleEntry, TensorEntry)):
                entry.capture(listed)
        for name, tensor, role in listed.listed:
            try:
                layout = None if role.replication is Replication.PER_RANK else layout_of(tensor)
            except Unsupported as error:
                raise unsavable(tensor, name, str(error)) from error
            if layout is None and role.replication in (Replication.PER_RANK, Replication.OWN):
                others.add(name)
            elif layout is None or layout.is_own or self._world()[0] in layout.holders:
                tensors[name] = str(tensor.dtype), shape_of(tensor), layout
        return inventory(entries, tensors, others)

    def capture(self) -> CapturedState:
        """Return all tensors and values of the state now, with the process-wide RNG states.

        Tensors are not copied: copy them before anything changes them. Their memory stays in use until the
        next capture or load, even if training releases it.

        Ranks: not collective by itself; a user's state_dict() may be, and that of FSDP1 is.
        """
        entries = self._current()
        table = self._table.begin(*self._world())
        values = _capture(entries, table)
        optimizers = _optimizers_of(entries)
        hooked = [one for one in optimizers if has_step_hooks(one)]
        values[rng.KEY] = rng.capture(table)
        owners, is_known = list(map(parameters, hooked)), len(hooked) == len(optimizers)
        lent = chain.from_iterable(map(tensors_of, self._lent_optimizers))
        return table.captured(values, self._agreed(), owners, lent, is_frozen_known=is_known)

    def skippables(self) -> dict[str, Skippable]:
        """Return the objects that can skip samples, by key path."""
        return {key: one.value for key, one in self._current().items() if is_skippable(one.value)}

    def streams(self) -> list[str]:
        """Return the key paths of loaders and samplers that cannot skip samples."""
        found = {key: one.value for key, one in self._current().items() if isinstance(one, StatefulEntry)}
        return [key for key, value in found.items() if is_stream(value) and not is_skippable(value)]

    def followers(self) -> list[Any]:
        """Return the objects that follow completed steps, as of the last capture or load."""
        if self._followers is None:
            found = {id(one.value): one.value for one in self._found.values() if is_follower(one.value)}
            self._followers = list(found.values())
        return self._followers

    def review(
        self, stepped: Iterable[torch.optim.Optimizer] = (), *, has_live_objects: bool = True
    ) -> list[ResumeRisk]:
        """Return the parts of the state that will not resume exactly; see `find_resume_risks`.

        `stepped` are the optimizers that have begun a step, in the state or not.
        """
        values = {key: entry.value for key, entry in self._current().items()}
        if not has_live_objects:
            return find_resume_risks(values, has_live_objects=False)
        saved = self.saved_addresses()
        forgotten = [
            one
            for one in stepped
            if any(
                local_of(tensor).data_ptr() not in saved
                for tensor in state_tensors(one)
                if tensor.numel() and tensor.layout is torch.strided  # others have no memory of their own
            )
        ]
        # Tensors of the last capture that a restore could not write to.
        filled = [key for key, one in self._entries.items() if one.is_filled]
        read_only = find_read_only(self._table.tensors)
        read_only = [name for name in read_only if any(is_under(name, key) for key in filled)]
        return find_resume_risks(values, read_only, forgotten)

    def saved_addresses(self) -> set[int]:
        """Return the addresses of the tensors of the last capture."""
        return {one.data_ptr() for one in self._table.tensors.values()}

    def review_loaders(self) -> list[str]:
        """Return a sentence for each data loader that is being read and will not resume; each once."""
        return list(loader_doubts([one.value for one in self._found.values()]))

    @contextlib.contextmanager
    def lent(
        self, objects: MutableMapping[str, Any], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> Iterator[None]:
        """Use other objects within a context, which may refer to the memory of optimizers."""
        own, self._objects, self.are_lent = self._objects, objects, True
        self._lent_optimizers = [one for one in optimizers if has_step_hooks(one)]
        self._release_memory()
        try:
            yield
        finally:
            self._objects, self._entries, self._found = own, {}, {}
            self._release_memory()
            self._lent_optimizers, self.are_lent = [], False

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose steps change tensors in `CapturedState.owned`."""
        return [*filter(has_step_hooks, _optimizers_of(self._current())), *self._lent_optimizers]

    def marks(self) -> object:
        """Return a value that changes whenever training changes the state.

        Empty if `optimizers` returns all optimizers: their steps are counted instead. Otherwise it is made of
        the version counters of the tensors that the other optimizers train, or, without any optimizer, of
        those of all tensors and of all plain values. Objects with a state_dict() are not included.
        """
        entries = self._current()
        if optimizers := _optimizers_of(entries):
            own = [one for one in optimizers if not has_step_hooks(one) and hasattr(one, "param_groups")]
            return versions(tensor for one in own for tensor in parameters(one))
        table = self._marked.begin(*self._world())
        kinds = (ModuleEntry, TensorEntry, ValueEntry)
        chosen = {key: one for key, one in entries.items() if isinstance(one, kinds)}
        try:
            values = _capture(chosen, table)
        except Unsupported:  # a save raises it, such as for a meta module; until then the state may change
            return next(_numbers)
        table.end()
        if table.has_new_memory:
            self._memory_number = next(_numbers)
        # The table holds an alias of each tensor. So the memory of a tensor that training replaces stays in
        # use until the next mark, and no new tensor can start at the same address before it.
        parts = (one if type(one) in PLAIN else local_of(one) for one in table.live)
        return values, self._memory_number, versions(parts)

    def load(
        self,
        tensors: Mapping[str, Tensor],
        tied: Mapping[str, str],
        values: Mapping[str, Any],
        *,
        others: Sequence[Mapping[str, Any]] = (),
        strict: bool = True,
        only: Collection[str] | None = None,
        kept: Collection[str] = (),
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        with_rng: bool = True,
        own_rank: bool = True,
    ) -> Load:
        """Plan how the live state is filled from a checkpoint. Nothing live is changed.

        `values` are of the part that is chosen for this rank; `others` of one part for each other structure,
        such as other pipeline stages, with further parameters. Names that only other ranks hold now (see
        `agree`) are no error. `only` and `kept` have live top-level keys, or key paths of objects in
        containers. Unless `own_rank` itself has saved `values`, RNG states are not restored; seeds are
        derived from them, so that no two ranks draw the same numbers.

        Ranks: not collective by itself; FSDP1 is, and a user's state_dict() may be: if tensors may be
        sharded, it is called to find its DTensors.
        """
        self._release_memory()  # a load replaces tensors: the memory of the old ones must be free
        entries = self._current()
        wanted = self._wanted(only, kept)
        plan = Load(tensors, tied, values, renamer(rename), others=others, rank=self._world()[0])
        for entry in sorted(entries.values(), key=_get_is_first, reverse=True):
            if wanted is None or entry.key in wanted:
                entry.plan(plan)
        plan.add_step(LoadPhase.VALUE, partial(self._replace, plan.replaced))  # after those of entries
        if not with_rng:
            plan.leave(rng.KEY)
        elif wanted is None or rng.KEY in wanted:
            rng.plan(plan, *self._world(), own_rank=own_rank)
        agreement = self._agreed()
        held = (agreement.names, agreement.keys) if not agreement.is_alike else None
        extra = leftover(plan, [*entries, rng.KEY], wanted, held)
        return plan.complete(extra, strict=strict)

    def load_new(
        self,
        tensors: Mapping[str, Tensor],
        tied: Mapping[str, str],
        values: Mapping[str, Any],
        *,
        only: Collection[str] | None = None,
        with_rng: bool = False,
        own_rank: bool = True,
    ) -> Load:
        """Plan a load of all values and whole tensors into new memory, and into the mapping of the state.

        A value is rebuilt as it was saved. Tensors of a module come under its key, as in its state_dict();
        those of an optimizer by the name of their parameter. `only` are top-level keys; for the others see
        `load`.
        """
        self._release_memory()
        plan = Load(tensors, tied, values, renamer(None), rank=self._world()[0])
        _plan_new(plan, self._objects, _chosen(plan, only))
        if with_rng:
            rng.plan(plan, *self._world(), own_rank=own_rank)
        return plan.complete([], strict=False)

    def _replace(self, replaced: Mapping[str, Any]) -> None:
        """Set the objects that a load has made anew, by top-level key."""
        for key, new in replaced.items():  # not update(): a user's mapping may give it another meaning
            self._objects[key] = new

    def _wanted(self, only: Collection[str] | None, kept: Collection[str]) -> set[str] | None:
        if only is None:
            return {*self._found, rng.KEY}.difference(kept) if kept else None
        chosen = {only} if isinstance(only, str) else set(only)
        if unknown := sorted(chosen - set(self._found) - {rng.KEY}):
            raise InvalidInput(
                f"only= names {unknown}, which are not in the state. Its keys: {sorted(self._found)}. "
                "Nothing was changed.",
                key=unknown[0],
            )
        return (chosen | {key for key, one in self._found.items() if one.root in chosen}).difference(kept)

    def _current(self) -> dict[str, StateEntry]:
        """Return the entries of the current mapping. Entries of unchanged objects are kept."""
        entries: dict[str, StateEntry] = {}
        self._found, self._followers = find_entries(self._objects), None
        for key, found in self._found.items():
            known = self._entries.get(key)
            is_kept = known is not None and known.value is found.value
            if known is None or not is_kept or known.replication is not found.replication or _is_stale(known):
                _check_key(key)
                known = self._classify(key, found.value, found.replication)
            entries[key] = known
        self._entries = entries
        return entries

    def _classify(self, key: str, value: Any, replication: Replication | None) -> StateEntry:
        if _DEEPSPEED in sys.modules:
            check_not_partitioned(key, value)
        if isinstance(value, torch.nn.Module):
            kind = FSDP1ModuleEntry if is_fsdp1(value) else ModuleEntry
            return kind(key, value, replication)
        if isinstance(value, torch.optim.Optimizer) and has_step_hooks(value) and is_plain(value):
            if (flat := self._fsdp1_module_of(value)) is not None:
                return FSDP1OptimizerEntry(key, value, replication, flat)
            return OptimizerEntry(key, value, replication, self._parameter_names)
        if isinstance(value, torch.Tensor):
            return TensorEntry(key, value, replication)
        if is_generator(value):
            return GeneratorEntry(key, value, replication)
        if is_stateful(value) and not isinstance(value, type):
            return StatefulEntry(key, value, replication)
        return ValueEntry(key, value, replication)

    def _fsdp1_module_of(self, optimizer: torch.optim.Optimizer) -> FSDP1ModuleEntry | None:
        """Return the entry of the FSDP1 module with an optimizer's parameters, or None."""
        owned = set(map(id, parameters(optimizer)))
        for key, found in self._found.items():
            if not isinstance(found.value, torch.nn.Module) or not is_fsdp1(found.value):
                continue
            if not owned.isdisjoint(map(id, found.value.parameters())):
                return FSDP1ModuleEntry(key, found.value, found.replication)
        return None

    def _parameter_names(self) -> dict[int, str]:
        """Return names of all live parameters of the state by id, including meta tensors."""
        names: dict[int, str] = {}
        for entry in self._entries.values():
            if isinstance(entry, ModuleEntry):
                for name, parameter in entry.named_parameters():
                    names.setdefault(id(parameter), name)
            elif isinstance(entry, TensorEntry) and isinstance(entry.value, torch.nn.Parameter):
                names.setdefault(id(entry.value), entry.key)
        return names

    def _agreed(self) -> HolderAgreement:
        """Return the ranks' agreement with the user's marks. By default all ranks are alike."""
        rank, world_size = self._world()
        agreed = self._agreement
        if agreed is None or (agreed.rank, agreed.world_size) != (rank, world_size):
            agreed = HolderAgreement(rank, world_size)
        marked = {key: one.ranks for key, one in self._found.items() if one.ranks is not None}
        return replace(agreed, marked=marked) if marked else agreed

    def _release_memory(self) -> None:
        for table in (self._table, self._marked):
            if table.live:
                table.release()

    def _world(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""
        if self._given_world is not None or not may_be_sharded():
            return self._given_world or (0, 1)
        return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _capture(entries: Mapping[str, StateEntry], table: TensorTable) -> dict[str, Any]:
    """Return the values of all entries. Modules come first: optimizers name their state after parameters."""
    values: dict[str, Any] = dict.fromkeys(entries)
    for entry in sorted(entries.values(), key=_get_is_first, reverse=True):
        try:
            values[entry.key] = entry.capture(table)
        except RecursionError as error:
            raise contains_itself(entry.key) from error
    return values


def _optimizers_of(entries: Mapping[str, StateEntry]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a state, each once."""
    values = [one.value for one in entries.values()]
    return list({id(one): one for one in values if isinstance(one, torch.optim.Optimizer)}.values())


def _is_stale(entry: StateEntry) -> bool:
    """Return True if an object has to be classified anew: hooks changed, or DeepSpeed may have taken it."""
    value = entry.value
    if _DEEPSPEED in sys.modules and may_be_partitioned(value):
        return True
    if not isinstance(value, torch.optim.Optimizer) or not has_step_hooks(value):
        return False
    return is_plain(value) is not isinstance(entry, _PLAIN_OPTIMIZERS)


def _chosen(plan: Load, only: Collection[str] | None) -> list[str]:
    """Return the keys of a checkpoint that are loaded: those of `only`, or all but the generators'."""
    saved = [key for key in plan.keys.values() if key != rng.KEY]
    if only is None:
        return saved
    wanted = [only] if isinstance(only, str) else list(only)
    if missing := sorted(set(wanted).difference(saved)):
        raise InvalidInput(
            f"only= names {missing}, which the checkpoint does not have. Its keys: {saved}. Nothing was "
            "loaded.",
            key=missing[0],
        )
    return [key for key in saved if any(is_under(key, one) for one in wanted)]


def _plan_new(plan: Load, target: MutableMapping[str, Any], keys: Collection[str]) -> None:
    """Plan to put the saved values of some keys into a mapping, with whole tensors in new memory.

    Nothing in the mapping is changed before all tensors are filled.
    """
    trees = {key: plan.values(key) for key in keys}
    referenced = [name for tree in trees.values() for name in references(tree)]
    known = set(referenced)  # modules and optimizers have tensors that no value refers to
    others = [name for name in plan.saved_names if name not in known]
    implied = [name for name in others if any(is_under(name, key) for key in keys)]
    for name in (*referenced, *implied):
        plan.read(name)

    _warn_of_types([found for key, tree in trees.items() for found in _named(tree, key)])

    def finish() -> None:
        new = {key: insert_tensors(tree, plan.tensor, is_live=False) for key, tree in trees.items()}
        new = {key: placed_composites(one) if type(one) is dict else one for key, one in new.items()}
        for name in implied:
            insert(new, name, plan.tensor(name))
        target.update(place_entries(new))

    plan.add_step(LoadPhase.VALUE, finish)


def _warn_of_types(named: list[tuple[str, str]]) -> None:
    """Warn that values come back as other types than they were saved with."""
    if not named:
        return
    path, kind = named[0]
    others = "" if len(named) == 1 else f", and {units.plural(len(named) - 1, 'other value')} likewise"
    warn(
        f"{path} was saved as {kind}{others}. A checkpoint only names types, so load() returns the content "
        "without them: SavedEnum, SavedDataclass or SavedNamedTuple objects, and a defaultdict without its "
        "factory. Pass load(into=...) with a value of the type in its place, or save a plain value there.",
        ResumeWarning,
    )


def _named(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and type of each value whose type is only named."""
    if isinstance(tree, NAMED_TYPES):
        yield path, f"a {tree.type.replace(':', '.')}"
    elif type(tree) is collections.defaultdict:
        yield path, "a collections.defaultdict"
    elif (kind := kind_of(tree)) is not None and not isinstance(tree, SavedTensor):
        keys = tree if isinstance(tree, dict) else ()
        yield from (one for key in keys for one in _named(key, f"{path}.<key>"))
        for step, item in kind.items(tree):
            yield from _named(item, f"{path}.{step}")


def _check_key(key: Any) -> None:
    if not isinstance(key, str) or not key or key == rng.KEY or "/" in key or "@" in key:
        raise InvalidInput(
            f"{key!r} cannot be a key of the state: keys are non-empty strings without '/' and '@', and "
            f"{rng.KEY!r} is reserved for the random number generators. Nothing was written. Rename it.",
            key=str(key),
        )
