"""Modules: parameters and buffers by canonical name, regardless of wrappers; trials of load code."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from msgspec import Struct
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from holdfast.checkpoint.format.composites import UNDER, SavedTensor
from holdfast.checkpoint.format.nesting import is_under, placed_composites
from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.state.entry import HIDDEN, Replication, StateEntry, hidden_state, set_hidden_state
from holdfast.checkpoint.state.fitting import Fitting
from holdfast.checkpoint.state.load import Load, LoadPhase, Maker, fill_composite
from holdfast.checkpoint.state.sharding import shape_of
from holdfast.checkpoint.state.tensor_table import Role, TensorTable
from holdfast.checkpoint.state.tensors import PLAIN, is_composite
from holdfast.checkpoint.state.tree import has_saved_form, references
from holdfast.errors import Corrupt, InvalidInput

_CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"
_PLAIN = frozenset(PLAIN)
_WRAPPER_PARTS = frozenset({"module", "_orig_mod", _CHECKPOINT_WRAPPED})
EXTRA = "extra_state"
_get_is_meta = operator.attrgetter("is_meta")
_MISMATCH = "size mismatch for"  # torch's words for a shape that load code did not adapt


class _ModuleLayout(Struct, frozen=True):
    """Names and roles of the items of a module's state_dict(), valid while `facts` stay the same."""

    facts: list[object]  # keys and kinds of its state_dict(), and what is known of possible wrappers
    wrappers: tuple[str, ...]  # paths that may hold a wrapper
    fqns: list[str]  # names in the module
    names: list[str]  # in the state
    roles: list[Role]
    are_tensors: bool


@final
class ModuleEntry(StateEntry):
    """A module, wrapped or not.

    Names are those of `torch.distributed.checkpoint.state_dict`: the parts that DDP, torch.compile and
    activation checkpointing add are left out.
    """

    is_first = True
    is_filled = True

    def __init__(self, key: str, value: torch.nn.Module, replication: Replication | None = None) -> None:
        super().__init__(key, value, replication)
        self._layout: _ModuleLayout | None = None

    @override
    def capture(self, table: TensorTable) -> Any:
        state = self.value.state_dict(keep_vars=True)
        layout, values = self._current(state), list(state.values())
        hidden = hidden_state(self.value)
        own = {HIDDEN: encode(hidden, self.key)} if hidden else {}
        if layout.are_tensors and table.collect_all(layout.names, layout.roles, values):
            return own
        extra: dict[str, Any] = {}
        under: dict[str, Any] = {}
        for fqn, name, role, value in zip(layout.fqns, layout.names, layout.roles, values, strict=True):
            if not isinstance(value, torch.Tensor):
                extra[fqn] = table.encode(value, name, role, named_types=True)
            elif is_composite(value):
                under[fqn] = table.encode_composite(name, value, role)
            else:
                table.collect(name, value, role)
        if under:
            own[UNDER] = under
        return {**own, EXTRA: extra} if extra else own

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield parameters by the names that `capture` gives them, also those on meta."""
        state = self.value.state_dict(keep_vars=True)
        for name, value in zip(self._current(state).names, state.values(), strict=True):
            if isinstance(value, torch.nn.Parameter):
                yield name, value

    def has_meta(self) -> bool:
        """Return True if the module has tensors on the meta device. A restore makes them real."""
        return any(map(_get_is_meta, _tensors_of(self.value)))

    @override
    def plan(self, plan: Load) -> None:
        module: torch.nn.Module = self.value
        state = module.state_dict(keep_vars=True)
        live = set(map(id, _tensors_of(module)))
        self._plan_meta(plan)
        parts = list(filter(None, plan.all_values(self.key)))  # most modules have none
        trees = saved_trees(plan, self.key, parts) if parts else {}
        names = self._current(state).names
        adapted = self._find_adapted(plan, zip(names, state.values(), strict=True))
        made: dict[str, Maker] = {}  # makers of tensors, and of other values, for the module's load code
        for name, (key, value) in zip(names, state.items(), strict=True):
            saved, tree = plan.saved_names.get(name), trees.get(name)
            if saved is None or isinstance(tree, SavedTensor):
                trees.pop(name, None)
            else:
                tree = None
            if tree is not None and id(value) not in live:
                fitting = plan.fit(tree, value, name) if has_saved_form(tree) else Fitting(tree)
                if fitting is not None:
                    made[key] = plan.read_tree(fitting.tree)
            elif isinstance(tree, SavedTensor):
                fill_composite(plan, tree, value, name)
            elif saved is None:
                plan.missing.append(name)
            elif id(value) in adapted:
                plan.read(saved, value.device)  # load code gives it its saved shape
                made[key] = partial(plan.tensor, saved, value.device)
            elif id(value) in live:
                plan.fill(saved, value, name)
            else:
                # A hook makes it; load code may combine it with others, all DTensors.
                made[key] = plan.read_as(saved, value, name)
        plan.unexpected += trees
        plan.used.update(references(_composites(trees)))  # they are listed by their own names
        if made or any(map(_has_own_load_code, module.modules())):
            plan.add_step(LoadPhase.MODULE, lambda: self._finish(made))
        _plan_hidden(plan, module, parts)

    def _find_adapted(self, plan: Load, values: Iterable[tuple[str, Any]]) -> frozenset[int]:
        """Return the ids of live tensors that get their saved shapes from load code.

        The load code of the nearest module that has some runs on a copy, whose tensors have no memory.
        Nothing live changes, and a module of another size is refused before a restore begins.
        """
        names: dict[int, str] = {}
        is_resized = False
        for name, value in values:
            saved = plan.saved_names.get(name)
            if saved is not None and isinstance(value, torch.Tensor):
                names[id(value)] = saved
                is_resized = is_resized or plan.shape(saved) != shape_of(value)
        if not is_resized:
            return frozenset()
        with torch.device("meta"):
            blank = {at: torch.empty(plan.shape(name), dtype=plan.dtype(name)) for at, name in names.items()}
        changed = {id(one) for one in _tensors_of(self.value) if _may_change(one, blank.get(id(one)))}
        loaders = _loaders(self.value, changed)
        return frozenset(one for module, ids in loaders if _accepts(module, blank) for one in ids)

    def _finish(self, made: dict[str, Maker]) -> None:
        """Run the module's own load code. Parameters that are already filled are copied onto themselves."""
        state = self.value.state_dict(keep_vars=True)
        live = set(map(id, _tensors_of(self.value)))
        for key, value in list(state.items()):
            if key in made:
                state[key] = made[key]()
            elif id(value) not in live or is_composite(value):
                del state[key]
        try:
            with torch.no_grad():
                self.value.load_state_dict(state, strict=False)
        except Exception as error:
            raise InvalidInput(
                f"{self.key}: load_state_dict() rejected the saved state_dict(): {error}. The state may be "
                "partly restored: do not train with it. Build the module as it was when it was saved, or "
                "leave it out with only=.",
                key=self.key,
            ) from error

    def _plan_meta(self, plan: Load) -> None:
        """Choose where meta tensors become real. Raise for those that no checkpoint holds."""
        if not self.has_meta():
            return
        module: torch.nn.Module = self.value
        tensors = list(_tensors_of(module))
        lost = [
            ".".join(part for part in (path, name) if part)
            for path, child in module.named_modules()
            for name in sorted(child._non_persistent_buffers_set)
            if (buffer := child._buffers.get(name)) is not None and buffer.is_meta
        ]
        if lost:
            raise InvalidInput(
                f"{self.key} has non-persistent buffers on the meta device, which no checkpoint holds: "
                f"{', '.join(lost[:10])}. Nothing was changed. Make them real before you restore: build the "
                "module on a real device, or call to_empty() and initialize these buffers.",
                key=f"{self.key}.{lost[0]}",
            )
        real = next((t.device for t in tensors if not t.is_meta), torch.get_default_device())
        device = torch.device("cpu") if real.type == "meta" else real
        for tensor in tensors:
            if tensor.is_meta:
                plan.real_devices[id(tensor)] = device

    def _current(self, state: dict[str, Any]) -> _ModuleLayout:
        """Return the layout of a state_dict(), made again if it no longer holds."""
        known = self._layout
        if known is None or known.facts != self._facts(known.wrappers, state):
            wrappers, values = _wrapper_paths(state), list(state.values())
            found = [canonical(self.value, key) for key in state]
            self._layout = known = _ModuleLayout(
                facts=self._facts(wrappers, state),
                wrappers=wrappers,
                fqns=[fqn for fqn, _, _ in found],
                names=[f"{self.key}.{fqn}" for fqn, _, _ in found],
                roles=[self._role(value, *one) for value, (_, *one) in zip(values, found, strict=True)],
                are_tensors=all(isinstance(value, torch.Tensor) for value in values),
            )
        return known

    def _role(self, value: Any, parameter: Replication, buffer: Replication) -> Role:
        if not isinstance(value, torch.Tensor):
            return Role(self.replication or buffer)  # of the tensors in it
        is_parameter = isinstance(value, torch.nn.Parameter)
        replication = self.replication or (parameter if is_parameter else buffer)
        return Role(replication, is_named=is_parameter, in_module=True)

    def _facts(self, wrappers: tuple[str, ...], state: dict[str, Any]) -> list[object]:
        kinds: list[object] = list(map(type, state.values()))
        if not _PLAIN.issuperset(kinds):  # a DTensor may be a parameter or not
            kinds = [
                kind if kind in _PLAIN else (kind, isinstance(value, torch.nn.Parameter))
                for kind, value in zip(kinds, state.values(), strict=True)
            ]
        facts: list[object] = [list(state), kinds]
        for path in wrappers:
            module = functools.reduce(_child, path.split(".") if path else [], _unwrapped(self.value))
            facts.append(_wrapper_facts(module))
        return facts


def saved_trees(plan: Load, key: str, parts: Iterable[Any]) -> dict[str, Any]:
    """Return the saved values of a module beside its plain tensors, by live name."""
    prefix, trees = f"{plan.keys.get(key)}.", dict[str, Any]()
    for values in parts:  # the first one with a name wins
        if not isinstance(values, dict):
            continue
        extra = values.get(EXTRA, {})
        if not isinstance(extra, dict):
            raise Corrupt(f"{key}: the saved extra state of a module is damaged.", key=key)
        placed = placed_composites(values)  # also those of an imported dict
        trees = {**extra, **_composites(placed), **trees}
    return {plan.rename(prefix + fqn): tree for fqn, tree in trees.items()}


def _composites(trees: Mapping[str, Any]) -> dict[str, SavedTensor]:
    return {name: tree for name, tree in trees.items() if isinstance(tree, SavedTensor)}


def _plan_hidden(plan: Load, module: torch.nn.Module, parts: list[Any]) -> None:
    for values in parts:  # the first one that has it wins
        if isinstance(values, dict) and isinstance(hidden := values.get(HIDDEN), dict):
            plan.add_step(LoadPhase.MODULE, partial(set_hidden_state, module, hidden))
            return


def canonical(root: torch.nn.Module, key: str) -> tuple[str, Replication, Replication]:
    """Return a state_dict() key without wrappers, and its replication as parameter and as buffer."""
    parameter, buffer = Replication.REPLICATED, Replication.OWN
    parts: list[str] = []
    module: Any = _unwrapped(root)
    steps = key.split(".")
    for i, part in enumerate(steps):
        if isinstance(module, DistributedDataParallel) and part == "module":
            if ".".join(steps[i + 1 :]) in module.parameters_to_ignore:
                parameter, buffer = Replication.OWN, Replication.OWN
            elif module.broadcast_buffers:
                buffer = Replication.LOWEST
        elif not (part == _CHECKPOINT_WRAPPED or (part == "_orig_mod" and _is_compiled(module))):
            parts.append(part)
        module = _child(module, part)
    return ".".join(parts), parameter, buffer


def _wrapper_paths(keys: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the wrapped modules in some keys: those before a wrapper's part."""
    split = [key.split(".") for key in keys]
    found = (parts[:i] for parts in split for i, part in enumerate(parts) if part in _WRAPPER_PARTS)
    return tuple(dict.fromkeys(map(".".join, found)))


def _child(module: Any, part: str) -> Any:
    return module if part == _CHECKPOINT_WRAPPED else _unwrapped(getattr(module, part, None))


def _unwrapped(module: Any) -> Any:
    """Return a module without the wrapper of activation checkpointing, which names leave out."""
    while isinstance(module, torch.nn.Module) and _CHECKPOINT_WRAPPED in module._modules:
        module = module._modules[_CHECKPOINT_WRAPPED]
    return module


def _wrapper_facts(module: Any) -> object:
    """Return the facts about a possible wrapper that names and replication depend on."""
    if isinstance(module, DistributedDataParallel):
        return (type(module), module.broadcast_buffers, frozenset(module.parameters_to_ignore))
    return type(module)


def _is_compiled(module: Any) -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _has_own_load_code(module: torch.nn.Module) -> bool:
    """Return True if loading a module without its children does more than copy its tensors."""
    plain, kind = torch.nn.Module, type(module)
    return bool(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or kind.load_state_dict is not plain.load_state_dict
        or (
            kind._load_from_state_dict is not plain._load_from_state_dict
            and not kind._load_from_state_dict.__module__.startswith("torch.nn.")
        )
    )


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def _may_change(live: torch.Tensor, saved: torch.Tensor | None) -> bool:
    is_plain = type(live) in PLAIN and live.layout is torch.strided and not live.is_meta
    return saved is not None and saved.shape != live.shape and is_plain and not is_composite(live)


def _loaders(root: torch.nn.Module, ids: set[int]) -> list[tuple[torch.nn.Module, set[int]]]:
    """Return each module whose load code is the nearest to some tensors, with their ids."""
    loaders = {path: module for path, module in root.named_modules() if _has_own_load_code(module)}
    nearest: dict[str, set[int]] = {path: set() for path in loaders}
    for path, module in root.named_modules():
        own = chain(module._parameters.values(), module._buffers.values())
        around = [at for at in loaders if is_under(path, at)]
        if around:
            nearest[max(around, key=len)] |= ids.intersection(map(id, own))
    return [(loaders[path], found) for path, found in nearest.items() if found]


def _accepts(module: torch.nn.Module, saved: Mapping[int, torch.Tensor]) -> bool:
    """Return True if load code, tried on a copy, takes the saved shapes."""
    hooks = [(m._load_state_dict_pre_hooks, m._load_state_dict_post_hooks) for m in module.modules()]
    if any(_is_bound_elsewhere(hook) for kinds in hooks for kind in kinds for hook in kind.values()):
        return False
    bare = {id(one): _without_memory(one) for one in _tensors_of(module)}
    try:
        trial = copy.deepcopy(module, {**bare})
    except Exception:  # noqa: BLE001 - FSDP2 refuses copies; then the shapes are an error, as everywhere else
        return False
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = saved.get(id(value), _without_memory(value))
    try:
        with torch.no_grad(), torch.device("meta"):  # what the load code makes fits the other tensors
            trial.load_state_dict(state, strict=False)
    except Exception as error:  # noqa: BLE001 - code that needs the values of tensors fails without memory
        return _MISMATCH not in str(error)
    return True


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    bare = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(bare, requires_grad=tensor.requires_grad)
    return bare


def _is_bound_elsewhere(hook: Any) -> bool:
    """Return True if a copy of its module would share live objects of a hook."""
    function = getattr(hook, "hook", hook)  # torch wraps hooks that receive their module
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the variable has no value
            if isinstance(cell.cell_contents, (torch.nn.Module, torch.Tensor)):
                return True
    return False
