"""FSDP1: modules whose parameters are pieces of flat tensors, saved through its own sharded state dicts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.optim import Optimizer

from holdfast.errors import InvalidInput
from holdfast.format.values import encode
from holdfast.state.capture import Sink
from holdfast.state.entry import Entry
from holdfast.state.load import Phase, Plan
from holdfast.state.modules import EXTRA, canonical
from holdfast.state.saved import SavedOptimizer
from holdfast.state.sharding import is_dtensor, is_sharded_tensor, note_copies
from holdfast.state.slots import is_slot_name
from holdfast.state.spread import Spread
from holdfast.state.table import Role
from holdfast.state.tree import graft, references, strip

_WRAPPED = "_fsdp_wrapped_module"


def is_flat(module: torch.nn.Module) -> bool:
    """True if a module has FSDP1 in it."""
    fsdp = _fsdp()
    return fsdp is not None and any(
        isinstance(child, fsdp.FullyShardedDataParallel) for child in module.modules()
    )


def _fsdp() -> Any:
    """FSDP1's package, if somebody has imported it."""
    return sys.modules.get("torch.distributed.fsdp")


@contextlib.contextmanager
def _sharded(module: torch.nn.Module) -> Iterator[Any]:
    """FSDP1's class, with state dicts of shards while the context lasts."""
    from torch.distributed import fsdp

    roots = fsdp.FullyShardedDataParallel.fsdp_modules(module, root_only=True)
    with contextlib.ExitStack() as stack:
        for root in roots:
            kind = fsdp.StateDictType.SHARDED_STATE_DICT
            stack.enter_context(fsdp.FullyShardedDataParallel.state_dict_type(root, kind))
        yield fsdp.FullyShardedDataParallel


@final
class FlatModuleEntry(Entry):
    """A module with FSDP1 in it.

    Its state dict holds copies, so nothing in it is owned by an optimizer.

    Ranks: capture, plan and finish are collective over the module's process group: FSDP1 gathers each
        parameter and cuts it anew.
    """

    _has_noted = False

    def capture(self, sink: Sink) -> Any:
        """See `Entry.capture`."""
        extra: dict[str, Any] = {}
        for name, fqn, value, role in self.rows():
            if isinstance(value, torch.Tensor):
                sink.take(name, value, role)
            else:
                extra[fqn] = encode(strip(value, name, sink.emitter(role.spread)), name)
        return {EXTRA: extra} if extra else {}

    def _note_copies(self) -> None:
        """Learn which ranks hold the same shards, where FSDP1 shards within groups and copies across them."""
        if self._has_noted:
            return
        self._has_noted = True
        seen: set[str] = set()
        for child in _fsdp().FullyShardedDataParallel.fsdp_modules(self.value):
            across = getattr(child, "_inter_node_pg", None)
            if across is not None and child.process_group.group_name not in seen:
                seen.add(child.process_group.group_name)
                copies: list[Any] = [None] * across.size()
                own = torch.distributed.get_process_group_ranks(child.process_group)
                torch.distributed.all_gather_object(copies, own, group=across)
                note_copies(child.process_group, copies)

    def rows(self) -> list[tuple[str, str, Any, Role]]:
        """Name, name within the module, value and role of all that the module's state dict holds."""
        module: torch.nn.Module = self.value
        self._note_copies()
        with _sharded(module):
            state = module.state_dict()
        buffers = {_bare(name) for name, _ in module.named_buffers(remove_duplicate=False)}
        rows = []
        for key, value in state.items():
            fqn, parameter, buffer = canonical(module, key)
            spread = self.spread or (buffer if key in buffers else parameter)
            rows.append((f"{self.key}.{fqn}", fqn, value, Role(spread, in_module=key not in buffers)))
        return rows

    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """See `Entry.plan`."""
        module: torch.nn.Module = self.value
        self._note_copies()
        with _sharded(module):
            state = module.state_dict()
        trees: dict[str, Any] = {}
        saved_key = plan.saved_key(self.key)
        for values in plan.all_values(self.key):
            found = values.get(EXTRA, {}) if isinstance(values, dict) else {}
            trees = {**{plan.rename(f"{saved_key}.{fqn}"): tree for fqn, tree in found.items()}, **trees}
        for key, value in state.items():
            name = f"{self.key}.{canonical(module, key)[0]}"
            saved = plan.saved_names.get(name)
            if saved is not None and isinstance(value, torch.Tensor):
                plan.fill(saved, value, name)
            elif name in trees:
                for reference in references(trees[name]):
                    plan.fresh(reference)
            else:
                plan.missing.append(name)

        def finish() -> None:
            for key in state:
                tree = trees.get(f"{self.key}.{canonical(module, key)[0]}")
                if tree is not None:
                    state[key] = graft(tree, plan.tensor)
            with _sharded(module):
                module.load_state_dict(state)

        plan.do(Phase.MODULE, finish)


@final
class FlatOptimizerEntry(Entry):
    """An optimizer of a module with FSDP1 in it.

    Args:
        key: the top-level key.
        value: the optimizer.
        spread: how its tensors are spread over the ranks, if the user has said so.
        module: the module's entry.

    Ranks: capture, plan and finish are collective over the module's process group.
    """

    def __init__(self, key: str, value: Optimizer, spread: Spread | None, module: FlatModuleEntry) -> None:
        super().__init__(key, value, spread)
        self._module = module

    def capture(self, sink: Sink) -> Any:
        """See `Entry.capture`."""
        state = self._state_dict()
        other: dict[str, Any] = {}
        role = Role(self.spread or Spread.REPLICATED)
        for fqn, slots in state["state"].items():
            name = self._name(fqn)
            for key, value in slots.items():
                if isinstance(value, torch.Tensor) and is_slot_name(key):
                    sink.take(f"{self.key}.state.{name}.{key}", value, role._replace(follows=name))
                else:
                    other.setdefault(name, {})[key] = strip(
                        value, f"{self.key}.state.{name}.{key}", sink.emitter_of(role)
                    )
        groups = [self._capture_group(i, group, sink) for i, group in enumerate(state["param_groups"])]
        return {"param_groups": groups, "state": encode(other, f"{self.key}.state")}

    def _capture_group(self, index: int, group: dict[str, Any], sink: Sink) -> dict[str, Any]:
        label = f"{self.key}.param_groups.{index}"
        emit = sink.emitter(self.spread or Spread.REPLICATED)
        options = {k: strip(v, f"{label}.{k}", emit) for k, v in group.items() if k != "params"}
        return {"params": [self._name(fqn) for fqn in group["params"]], **encode(options, label)}

    def plan(self, plan: Plan, put: Callable[[Any], None]) -> None:
        """See `Entry.plan`."""
        if plan.lacks(self.key):
            return
        saved = SavedOptimizer(self.key, plan)
        models = {name: value for name, _, value, _ in self._module.rows()}
        groups = self._state_dict()["param_groups"]
        chosen = [saved.choose(i, [self._name(f) for f in g["params"]]) for i, g in enumerate(groups)]
        made: dict[str, dict[str, Any]] = {}
        for group in groups:
            for fqn in group["params"]:
                name = self._name(fqn)
                one = saved.take(name)
                if one is None:
                    continue
                made[fqn] = {k: _new(plan, tensor, models[name]) for k, tensor in one.tensors.items()}
                for reference in references(one.trees):
                    plan.fresh(reference)
                made[fqn].update({k: _grafted(plan, tree) for k, tree in one.trees.items()})
        saved.skip_the_rest()
        for options in chosen:
            for reference in references(options):
                plan.fresh(reference)

        def finish() -> None:
            new = []
            for group, options in zip(groups, chosen, strict=True):
                kept = {k: v for k, v in (options or {}).items() if k not in ("params", "param_names")}
                new.append({**group, **graft(kept, plan.tensor)})
            state = {fqn: {k: make() for k, make in slots.items()} for fqn, slots in made.items() if slots}
            self._load({"state": state, "param_groups": new})

        plan.do(Phase.OPTIMIZER, finish)

    def _state_dict(self) -> dict[str, Any]:
        module = self._module.value
        with _sharded(module) as fsdp:
            return fsdp.optim_state_dict(module, self.value)

    def _load(self, state: dict[str, Any]) -> None:
        module = self._module.value
        try:
            with _sharded(module) as fsdp:
                self.value.load_state_dict(fsdp.optim_state_dict_to_load(module, self.value, state))
        except (KeyError, ValueError, RuntimeError) as error:
            message = f"{self.key}: FSDP's optim_state_dict_to_load() refused what was saved: {error}"
            raise InvalidInput(message, key=self.key) from error

    def _name(self, fqn: str) -> str:
        return f"{self._module.key}.{canonical(self._module.value, fqn)[0]}"


def _new(plan: Plan, saved: str, model: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Have a state tensor read, cut like its parameter if it is as large."""
    is_cut = is_dtensor(model) or is_sharded_tensor(model)
    if is_cut and plan.shape(saved) and plan.shape(saved) == tuple(model.shape):
        return plan.like(saved, model, saved)
    plan.fresh(saved)
    return lambda: plan.tensor(saved)


def _grafted(plan: Plan, tree: Any) -> Callable[[], Any]:
    return lambda: graft(tree, plan.tensor)


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _WRAPPED)
