"""FSDP1 modules, with parameters in flat tensors, saved through FSDP1's sharded state dicts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, final

import torch
from torch.optim import Optimizer
from typing_extensions import override

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.state.entry import Replication, StateEntry
from holdfast.checkpoint.state.load import Load, LoadPhase, Maker
from holdfast.checkpoint.state.modules import EXTRA, canonical, saved_trees
from holdfast.checkpoint.state.optimizers import capture_groups, find_saved, is_state_tensor_name, options_of
from holdfast.checkpoint.state.sharding import note_copies
from holdfast.checkpoint.state.tensor_table import Role, TensorTable
from holdfast.errors import InvalidInput

_WRAPPED = "_fsdp_wrapped_module"


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Return True if a module contains FSDP1."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in module.modules())


@contextlib.contextmanager
def _sharded(module: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP1's class; within the block its state dicts are sharded."""
    from torch.distributed import fsdp

    roots = fsdp.FullyShardedDataParallel.fsdp_modules(module, root_only=True)
    with contextlib.ExitStack() as stack:
        for root in roots:
            kind = fsdp.StateDictType.SHARDED_STATE_DICT
            stack.enter_context(fsdp.FullyShardedDataParallel.state_dict_type(root, kind))
        yield fsdp.FullyShardedDataParallel


@final
class FSDP1ModuleEntry(StateEntry):
    """A module that contains FSDP1.

    Its state dict holds copies, so none of its tensors is owned by an optimizer.

    Ranks: capture, plan and finish are collective over the module's process group: FSDP1 gathers each
        parameter and splits it again.
    """

    is_first = True

    _has_noted = False

    @override
    def capture(self, table: TensorTable) -> Any:
        extra: dict[str, Any] = {}
        for name, fqn, value, role in self.rows(self.state_dict()):
            if isinstance(value, torch.Tensor):
                table.collect(name, value, role)
            else:
                extra[fqn] = table.encode(value, name, Role(role.replication), composites=False)
        return {EXTRA: extra} if extra else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the module's sharded state dict, of copies."""
        if not self._has_noted:
            self._note_copies()
        with _sharded(self.value):
            return self.value.state_dict()

    def _note_copies(self) -> None:
        """Record which ranks hold the same shards, if FSDP1 shards within groups and copies across them."""
        from torch.distributed import fsdp

        self._has_noted = True
        seen: set[str] = set()
        children: Any = fsdp.FullyShardedDataParallel.fsdp_modules(self.value)
        for child in children:
            across = getattr(child, "_inter_node_pg", None)
            if across is not None and child.process_group.group_name not in seen:
                seen.add(child.process_group.group_name)
                copies: list[Any] = [None] * across.size()
                own = torch.distributed.get_process_group_ranks(child.process_group)
                torch.distributed.all_gather_object(copies, own, group=across)
                note_copies(child.process_group, copies)

    def rows(self, state: dict[str, Any]) -> list[tuple[str, str, Any, Role]]:
        """Return name, name within the module, value and role of the items of a state dict."""
        module: torch.nn.Module = self.value
        names = (name.split(".") for name, _ in module.named_buffers(remove_duplicate=False))
        buffers = {".".join(part for part in name if part != _WRAPPED) for name in names}
        rows = []
        for key, value in state.items():
            fqn, parameter, buffer = canonical(module, key)
            replication = self.replication or (buffer if key in buffers else parameter)
            role = Role(replication, in_module=key not in buffers, is_temporary=True)
            rows.append((f"{self.key}.{fqn}", fqn, value, role))
        return rows

    @override
    def plan(self, plan: Load) -> None:
        state = self.state_dict()
        trees = saved_trees(plan, self.key, plan.all_values(self.key))
        made: dict[str, Maker] = {}  # makers of other values, by key of the state dict
        for key, (name, _, value, _) in zip(state, self.rows(state), strict=True):
            saved = plan.saved_names.get(name)
            if saved is not None and isinstance(value, torch.Tensor):
                plan.fill(saved, value, name)
            elif name in trees and not isinstance(trees[name], SavedTensor):
                made[key] = plan.read_tree(trees[name])
            else:
                plan.missing.append(name)

        def finish() -> None:
            state.update({key: make() for key, make in made.items()})
            with _sharded(self.value):
                self.value.load_state_dict(state)

        plan.add_step(LoadPhase.MODULE, finish)


@final
class FSDP1OptimizerEntry(StateEntry):
    """An optimizer of a module that contains FSDP1, whose entry is `module`.

    Ranks: capture, plan and finish are collective over the module's process group.
    """

    def __init__(
        self, key: str, value: Optimizer, replication: Replication | None, module: FSDP1ModuleEntry
    ) -> None:
        super().__init__(key, value, replication)
        self._module = module

    @override
    def capture(self, table: TensorTable) -> Any:
        state = self._state_dict()
        other: dict[str, Any] = {}
        role = Role(self.replication or Replication.REPLICATED, is_temporary=True)
        for fqn, layout in state["state"].items():
            name = self._name(fqn)
            for key, value in layout.items():
                if isinstance(value, torch.Tensor) and is_state_tensor_name(key):
                    table.collect(f"{self.key}.state.{name}.{key}", value, role._replace(follows=name))
                else:
                    tree = table.extract(value, f"{self.key}.state.{name}.{key}", role, composites=False)
                    other.setdefault(name, {})[key] = tree
        groups = state["param_groups"]
        names = [[self._name(fqn) for fqn in group["params"]] for group in groups]
        saved = capture_groups(self, groups, names, table, composites=False)
        return {"param_groups": saved, "state": encode(other, f"{self.key}.state")}

    @override
    def plan(self, plan: Load) -> None:
        if plan.lacks(self.key):
            return
        models = {name: value for name, _, value, _ in self._module.rows(self._module.state_dict())}
        groups = self._state_dict()["param_groups"]
        names = [[self._name(fqn) for fqn in group["params"]] for group in groups]
        saved = find_saved(self.key, plan, names)
        made: dict[str, dict[str, Any]] = {}
        for fqn in (fqn for group in groups for fqn in group["params"]):
            name = self._name(fqn)
            if (state := saved.states.get(name)) is not None:
                tensors = {key: plan.read_as(one, models[name], one) for key, one in state.tensors.items()}
                made[fqn] = tensors | {key: plan.read_tree(tree) for key, tree in state.trees.items()}
        make_options = plan.read_tree([options_of(options or {}) for options in saved.options])

        def finish() -> None:
            new = [{**group, **options} for group, options in zip(groups, make_options(), strict=True)]
            state = {fqn: {k: make() for k, make in layout.items()} for fqn, layout in made.items() if layout}
            state |= {fqn: deepcopy(one) for fqn, one in state.items() if self._name(fqn) in saved.copied}
            self._load({"state": state, "param_groups": new})

        plan.add_step(LoadPhase.OPTIMIZER, finish)

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
            raise InvalidInput(
                f"{self.key}: FSDP's optim_state_dict_to_load() rejected the saved state: {error}. The "
                "state may be partly restored: do not train with it. Wrap the module as it was when it was "
                f"saved, or leave {self.key} out with only=.",
                key=self.key,
            ) from error

    def _name(self, fqn: str) -> str:
        return f"{self._module.key}.{canonical(self._module.value, fqn)[0]}"
