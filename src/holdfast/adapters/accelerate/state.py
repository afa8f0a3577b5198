"""State of an Accelerator for a Checkpointer: live objects, and positions of loaders in their data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from holdfast.adapters.kit import data as kit_data
from holdfast.adapters.kit.data import DividedBatches
from holdfast.adapters.kit.run import end_preempted, insert_class, unwrapped, warn_of_persistent_workers
from holdfast.errors import InvalidInput, ResumeWarning, Unsupported
from holdfast.system.callsite import warn

FOLDERS = "folders"
"""Key of the names of all folders, by step."""
PROGRESS = "accelerator"
"""Key of the Accelerator's own counter of batches."""
GENERATORS = "rng"


def live_objects(accelerator: Accelerator, models: Collection[int]) -> dict[str, Any]:
    """Return the objects of a checkpoint by key: `model`, `model_1`, `optimizer` and so on."""
    own: Any = accelerator
    if any(isinstance(value, DividedBatches) for value in own._custom_objects):
        raise InvalidInput(
            "GlobalBatches were given to register_for_checkpointing, and would count each step twice. "
            "Nothing was saved or loaded. Prepare their loader only: its position is part of the state."
        )
    objects = {_key("model", number): own._models[number] for number in models}
    for name, values in (("optimizer", own._optimizers), ("scheduler", own._schedulers)):
        objects |= {_key(name, number): unwrapped(value) for number, value in enumerate(values)}
    loaders = enumerate(own._dataloaders)
    objects |= {_key("loader", number): loader.holdfast_position for number, loader in loaders}
    objects |= {f"custom_{number}": unwrapped(value) for number, value in enumerate(own._custom_objects)}
    if own.scaler is not None:
        objects["scaler"] = own.scaler
    return objects


def _key(name: str, number: int) -> str:
    return name if number == 0 else f"{name}_{number}"


def saved_models(accelerator: Accelerator, folder: str) -> list[int]:
    """Run the hooks before a save, and return the numbers of the models to save.

    A hook that saves a model itself removes its weights from the list.
    """
    own: Any = accelerator
    hooks = list(own._save_model_state_pre_hook.values())
    numbers = list(range(len(own._models)))
    if not hooks:
        return numbers
    is_sharded = own.distributed_type == DistributedType.FSDP
    weights = [] if is_sharded else [own.get_state_dict(model, unwrap=False) for model in own._models]
    before = {id(state): {name: id(value) for name, value in state.items()} for state in weights}
    places = list(before)
    for hook in hooks:
        hook(own._models, weights, folder)
    if is_sharded:
        return numbers
    left = {id(state): {name: id(value) for name, value in state.items()} for state in weights}
    if not left.items() <= before.items():
        raise InvalidInput(
            f"A hook of register_save_state_pre_hook has changed weights, for {folder}. Holdfast saves the "
            "model itself, so they would be lost. Nothing was saved. Let the hook write what it wants to "
            "the folder, and remove the weights from the list."
        )
    return [number for number in numbers if places[number] in left]


def loaded_models(accelerator: Accelerator, folder: str) -> list[int]:
    """Run the hooks before a load, and return the numbers of the models to load.

    A hook that loads a model itself removes it from the list.
    """
    own: Any = accelerator
    is_sharded = own.distributed_type == DistributedType.FSDP
    models = [] if is_sharded else list(own._models)
    for hook in list(own._load_model_state_pre_hook.values()):
        hook(models, folder)
    left = {id(model) for model in models}
    return [number for number, model in enumerate(own._models) if is_sharded or id(model) in left]


BETWEEN, WITHIN, AT_END = "between", "within", "at end"
"""Phases: no pass is under way; one is; or one is, and its last batch has been given."""


class DataPosition:
    """Position of one loader. Each rank saves its own; with GlobalBatches it is the same on all ranks.

    The number of used batches is part of it with GlobalBatches only, of which a batch counts as used once the
    next one is requested, or the state is saved. Else the script has it, or a StatefulDataLoader.

    A stateful loader makes the iterator of its first pass when it is prepared, and draws from its generators
    then. So that pass began before the loader was prepared.
    """

    def __init__(self, loader: Any, before: UnpreparedGenerators | None = None) -> None:
        self.batches = batches_of(loader)
        if self.batches is not None:
            before = None
        self._loader = loader
        self._active: Any = None  # loader of the pass that is under way
        if is_stateful(loader) and before is None:
            loader.load_state_dict({})  # the first pass gets another iterator
        self._has_first = is_stateful(loader) and before is not None  # the iterator that was made first
        # Of the pass that is under way, or of the last one.
        self._at_start = before.states(loader) if before is not None else capture_generators(loader)
        self._pending: dict[str, Any] | None = None  # position from a checkpoint, until a pass begins
        self._has_begun = False  # there has been a pass
        self._num_before = 0  # batches of the epoch that earlier passes have used
        self._num_given = 0  # batches of the epoch that were given, while a pass is under way
        self._num_steps = 0  # optimizer steps of this pass that were counted

    # -- the state -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        active = self._loader if self._active is None else self._active
        phase = BETWEEN if self._active is None else AT_END if active.end_of_dataloader else WITHIN
        if self._active is not None:
            self._reach()
        # Nothing has been read since a pending one was loaded.
        found = self._pending or {
            "epoch": active.iteration,
            "phase": phase,
            "has_begun": self._has_begun,
            "at_start": self._at_start,
            "generators": _states_of(own_generators(self._loader)),
            "loader": self._loader.state_dict() if is_stateful(self._loader) else None,
            "num_ranks": PartialState().num_processes,
        }
        if self.batches is None:
            return found
        return {**found, "num_used": self.num_used, "batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position. A pass that is under way is not changed."""
        if self.batches is not None:
            if "batches" not in state:
                raise InvalidInput(
                    "The checkpoint has no position of GlobalBatches: it was saved with another kind of "
                    "loader. Training has not begun. Prepare the loader that the run was saved with."
                )
            self.batches.load_state_dict(state["batches"])
            self._num_before = 0 if state["phase"] == AT_END else state["num_used"]
        loader, self._active, self._has_begun = self._loader, None, state["has_begun"]
        self._has_first = self._has_first and not self._has_begun
        if self._has_first:
            self._at_start = state["at_start"]
        loader.set_epoch(state["epoch"])
        if state["num_ranks"] != PartialState().num_processes:
            self._pending = None
            self._load_elsewhere(state)
            return
        _set_states(own_generators(loader), state["generators"])
        if is_stateful(loader) and state["loader"] is not None:
            if state["phase"] == WITHIN:
                loader.load_state_dict(state["loader"])
            elif state["has_begun"]:
                loader.load_state_dict({})  # else it begins with the iterator that it was made with
        self._pending = state

    def _load_elsewhere(self, state: dict[str, Any]) -> None:
        """Load a position of another number of ranks, once the epoch is set."""
        if self.batches is not None and state["phase"] == AT_END:
            self._loader.iteration += 1
        elif self.batches is None and state["phase"] != BETWEEN:
            warn(
                f"The position in the data is of {state['num_ranks']} ranks, and this run has "
                f"{PartialState().num_processes}. The epoch is set, and the batches of the rest of it differ "
                "from those of an unbroken run. GlobalBatches in the loader resume on any number.",
                ResumeWarning,
            )

    # -- a pass ----------------------------------------------------------------------------------------------
    def batches_of_pass(self, loader: Any, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of one pass over a loader.

        Generators that a pass draws from when it begins, for the order of the data, are set to their states
        at the beginning of the pass that it continues, and set back before the first batch.
        """
        before = self._begin(loader)
        num_batches = 0
        try:
            for num_batches, batch in enumerate(read(), 1):
                if num_batches == 1 and before is not None:
                    set_generators(before, self._loader)
                if self._give(num_batches):
                    yield batch
        except GeneratorExit:  # by `break`
            self._reach()
            self._num_before, self._active = self._num_given, None
            raise
        except Exception as error:
            end_preempted(error)
            raise
        self._reach()
        self._num_before, self._active = 0, None
        if num_batches:
            self._loader.iteration = loader.iteration
        elif before is not None:
            set_generators(before, self._loader)
            self._loader.iteration = loader.iteration + 1  # Accelerate does not count a pass without a batch

    def _begin(self, loader: Any) -> dict[str, Any] | None:
        """Begin a pass; return the generators' present states if it continues the pass of a checkpoint."""
        if self.batches is not None:
            self.batches.complete_steps(0)
            self._num_given, self._num_steps = self._num_before, 0
        pending, self._pending = self._pending, None
        self._has_begun = True
        self._active, now = loader, capture_generators(self._loader)
        if not self._has_first:
            self._at_start = now
        self._has_first = False
        if pending is None or pending["phase"] == BETWEEN:
            return None
        continues_itself = is_stateful(self._loader) or self.batches is not None
        if not (loader.holdfast_continues or (continues_itself and pending["phase"] == WITHIN)):
            if pending["phase"] == AT_END and loader.iteration == pending["epoch"]:
                loader.iteration += 1  # that pass is over
            return None
        self._at_start = pending["at_start"]
        set_generators(self._at_start, self._loader)
        return now

    def _give(self, number: int) -> bool:
        """Record a batch that training gets. Return False if it is to be left out."""
        if self.batches is None:
            return True
        # The batches continue at a whole step. Gradients of a part of one are not saved, but it was used.
        in_step = self._num_before % self.batches.accumulation_steps
        if number <= in_step:
            return False
        self._reach()
        self._num_given = self._num_before - in_step + number
        return True

    def _reach(self) -> None:
        """Count the steps of the batches that were given."""
        if self.batches is not None:
            parts = self.batches.accumulation_steps
            num_steps = self._num_given // parts - self._num_before // parts
            self.batches.complete_steps(num_steps - self._num_steps)
            self._num_steps = num_steps

    @property
    def num_used(self) -> int:
        """Number of this rank's GlobalBatches of the epoch that training has used."""
        return self._num_before if self._active is None else self._num_given

    def check_skip(self, num_batches: int) -> bool:
        """Return True if the epoch continues after a number of GlobalBatches; False if that is its end."""
        assert self.batches is not None
        if num_batches == len(self.batches) and self.num_used == 0:
            return False
        if num_batches not in (0, self.num_used):
            raise InvalidInput(
                f"skip_first_batches was to skip {num_batches} batches of a loader with GlobalBatches that "
                f"has used {self.num_used} of its epoch. Nothing was skipped. Iterate over the loader "
                "itself: it continues at its position. batches.skip() leaves samples out."
            )
        return True


class UnpreparedGenerators:
    """States of generators before Accelerate prepares a data loader, and draws from them."""

    def __init__(self, loader: Any) -> None:
        self._own = [(own, own.get_state()) for own in kit_data.generators_of(loader)]
        self._process = kit_data.capture_process()

    def states(self, loader: Any) -> dict[str, Any]:
        """Return the states that the generators of the prepared loader had, as `capture_generators`."""
        own: dict[str, bytes] = {}
        for name, generator in own_generators(loader).items():
            # Accelerate has seeded those that did not exist before.
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()
            was = next((state for before, state in self._own if before is generator), fresh)
            own[name] = kit_data.bytes_of(was)
        return {**self._process, "own": own}


def is_stateful(loader: Any) -> bool:
    """Return True if a loader has a position of its own, as torchdata's StatefulDataLoader."""
    return bool(loader.use_stateful_dataloader)


def own_generators(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators that a loader draws from besides those of the process, by owner."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    owners = {
        "ranks": getattr(loader, "synchronized_generator", None),
        "sampler": getattr(sampler, "generator", None),
        "loader": getattr(loader.base_dataloader, "generator", None),
    }
    found = {name: own for name, own in owners.items() if isinstance(own, torch.Generator)}
    return {name: own for name, own in found.items() if own is not torch.default_generator}


def capture_generators(loader: Any) -> dict[str, Any]:
    """Return the states of the generators of the process and of a loader."""
    return {**kit_data.capture_process(), "own": _states_of(own_generators(loader))}


def set_generators(states: dict[str, Any], loader: Any) -> None:
    """Set the generators of the process and of a loader to states from `capture_generators`."""
    kit_data.set_process(states)
    _set_states(own_generators(loader), states["own"])


def _states_of(owned: dict[str, torch.Generator]) -> dict[str, bytes]:
    return {name: kit_data.bytes_of(generator.get_state()) for name, generator in owned.items()}


def _set_states(owned: dict[str, torch.Generator], states: dict[str, bytes]) -> None:
    for name, generator in owned.items():
        if name in states:
            generator.set_state(kit_data.tensor_of(states[name]))


def batches_of(loader: Any) -> DividedBatches | None:
    """Return the GlobalBatches that a loader reads, or None."""
    found = getattr(loader, "batch_sampler", None)
    return found if isinstance(found, DividedBatches) else None


def prepare_batches(accelerator: Accelerator, loader: DataLoader[Any], *, on_device: bool | None) -> Any:
    """Prepare a loader with GlobalBatches, which divide the data among the ranks themselves."""
    own: Any = accelerator
    batches = batches_of(loader)
    assert batches is not None
    _check_ranks(own, batches)
    prepared = kit_data.prepare_undivided(own, loader, on_device=on_device)
    prepared._drop_last = True  # else gather_for_metrics cuts the last batch as if the others were whole
    own._dataloaders.append(prepared)
    return prepared


def check_prepared(loader: Any) -> None:
    """Check that a loader that was prepared before `attach` has not divided GlobalBatches once more."""
    outer = getattr(loader, "batch_sampler", None)
    if isinstance(getattr(outer, "batch_sampler", None), DividedBatches):
        raise InvalidInput(
            "A loader with GlobalBatches was prepared before attach(), so each rank would get a part of its "
            "share. The Accelerator was not changed. Call attach() before prepare()."
        )


def _check_ranks(own: Any, batches: DividedBatches) -> None:
    parallelism = getattr(own, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise Unsupported(
            "GlobalBatches divide each batch among all ranks, but with tensor, context or sequence "
            "parallelism some need the same samples. The loader was not prepared. Use shuffle=True."
        )
    mine, theirs = (batches.rank, batches.world_size), (own.process_index, own.num_processes)
    if mine != theirs:
        raise InvalidInput(
            f"GlobalBatches are for rank {mine[0]} of {mine[1]}, and this is rank {theirs[0]} of "
            f"{theirs[1]}. The loader was not prepared. Make them after the Accelerator, which starts the "
            "process group."
        )
    if own.gradient_accumulation_steps not in (1, batches.accumulation_steps):
        raise InvalidInput(
            f"GlobalBatches have accumulation_steps={batches.accumulation_steps}, and the Accelerator has "
            f"gradient_accumulation_steps={own.gradient_accumulation_steps}. The loader was not prepared. "
            "Set the same number."
        )


class PositionedLoader:
    """Part of a prepared loader's class that records and continues its passes."""

    holdfast_position: DataPosition  # a loader without the first batches shares that of its origin
    holdfast_continues = False  # this loader continues the pass of a checkpoint, if it has one

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of a pass."""
        return self.holdfast_position.batches_of_pass(self, super().__iter__)  # pyright: ignore


def add_position(loader: Any, before: UnpreparedGenerators | None = None) -> Any:
    """Have a prepared loader record its position. Returns the same loader."""
    if not isinstance(_position_of(loader), DataPosition):
        insert_class(loader, PositionedLoader, before=type(loader))
        loader.holdfast_position = DataPosition(loader, before)
        if getattr(loader, "persistent_workers", False) and loader.generator is None:
            warn_of_persistent_workers("persistent_workers")
    return loader


def follow_position(loader: Any, origin: Any, *, continues: bool) -> Any:
    """Share the position of a whole loader with one without its first batches. Returns the latter."""
    position = _position_of(origin)
    if isinstance(position, DataPosition) and hasattr(loader, "iteration"):
        insert_class(loader, PositionedLoader, before=type(loader))
        loader.holdfast_position, loader.holdfast_continues = position, continues
    return loader


def _position_of(loader: Any) -> Any:
    return vars(loader).get("holdfast_position")
