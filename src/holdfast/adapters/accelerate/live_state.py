"""State of an Accelerator for a Checkpointer: the objects that were prepared and registered."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType

from holdfast.errors import InvalidInput
from holdfast.train.data import Batches

FOLDERS = "folders"
"""Key of the names of all folders, by step."""
PROGRESS = "accelerator"
"""Key of the Accelerator's own counter of batches."""
GENERATORS = "rng"
_MODEL = "model"


def live_objects(accelerator: Accelerator, models: Collection[int]) -> dict[str, Any]:
    """Return the objects of a checkpoint by key: `model`, `model_1`, `optimizer` and so on.

    Args:
        accelerator: the attached Accelerator.
        models: numbers of the models to include.
    """
    own: Any = accelerator
    if any(isinstance(one, Batches) for one in own._custom_objects):
        raise InvalidInput(
            "GlobalBatches were given to register_for_checkpointing, and would count each step twice. "
            "Nothing was saved or loaded. Prepare their loader only: its position is part of the state."
        )
    objects = {model_key(number): own._models[number] for number in models}
    objects |= _numbered("optimizer", [_bare(one) for one in own._optimizers])
    objects |= _numbered("scheduler", [_bare(one) for one in own._schedulers])
    objects |= _numbered("loader", [one.holdfast_position for one in own._dataloaders])
    objects |= {f"custom_{number}": _bare(one) for number, one in enumerate(own._custom_objects)}
    if own.scaler is not None:
        objects["scaler"] = own.scaler
    return objects


def model_key(number: int) -> str:
    """Return the key of a model."""
    return _MODEL if number == 0 else f"{_MODEL}_{number}"


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
    before = [(id(one), {name: id(value) for name, value in one.items()}) for one in weights]
    for hook in hooks:
        hook(own._models, weights, folder)
    if is_sharded:
        return numbers
    left = {id(one): {name: id(value) for name, value in one.items()} for one in weights}
    changed = [content for key, content in left.items() if (key, content) not in before]
    if changed:
        raise InvalidInput(
            f"A hook of register_save_state_pre_hook has changed weights, for {folder}. Holdfast saves the "
            "model itself, so they would be lost. Nothing was saved. Let the hook write what it wants to "
            "the folder, and remove the weights from the list."
        )
    return [number for number in numbers if before[number][0] in left]


def loaded_models(accelerator: Accelerator, folder: str) -> list[int]:
    """Run the hooks before a load, and return the numbers of the models to load.

    A hook that loads a model itself removes it from the list.
    """
    own: Any = accelerator
    is_sharded = own.distributed_type == DistributedType.FSDP
    models = [] if is_sharded else list(own._models)
    for hook in list(own._load_model_state_pre_hook.values()):
        hook(models, folder)
    left = {id(one) for one in models}
    return [number for number, one in enumerate(own._models) if is_sharded or id(one) in left]


def _numbered(name: str, values: list[Any]) -> dict[str, Any]:
    return {name if number == 0 else f"{name}_{number}": value for number, value in enumerate(values)}


def _bare(value: Any) -> Any:
    """Return what Accelerate's wrapper of an optimizer or a scheduler contains."""
    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    return value.scheduler if isinstance(value, AcceleratedScheduler) else value
