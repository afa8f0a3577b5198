"""Checks that an Accelerator can save through Holdfast, with the fix where it cannot."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from holdfast.errors import InvalidInput, Unsupported

_KNOWN_ARGUMENTS = frozenset({"map_location", "strict"})
_MAP_LOCATIONS = (None, "cpu", "on_device")


def check_accelerator(accelerator: Accelerator) -> None:
    """Check the kind of training that an Accelerator is configured for.

    Raises:
        InvalidInput: its configuration lacks something.
        Unsupported: Holdfast does not replace the way in which this kind of training saves.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        name = "DeepSpeed" if kind == DistributedType.DEEPSPEED else "Megatron-LM"
        raise Unsupported(
            f"The Accelerator uses {name}, whose engine saves by itself, so it was not changed. Use FSDP2 in "
            f"place of {name} (FullyShardedDataParallelPlugin(fsdp_version=2)), or leave attach() out."
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise Unsupported(
            "The Accelerator uses FSDP 1, so it was not changed. Set fsdp_version: 2 in its configuration, "
            "or FullyShardedDataParallelPlugin(fsdp_version=2) in the script."
        )
    if kind == DistributedType.XLA:
        raise Unsupported(
            "Training on TPUs is not supported. The Accelerator was not changed. Leave attach() out."
        )
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and config.project_dir is None:
        raise InvalidInput(
            "automatic_checkpoint_naming=True needs a folder for the checkpoints. The Accelerator was not "
            "changed. Set project_dir in ProjectConfiguration or in Accelerator."
        )


def check_load_arguments(arguments: dict[str, Any]) -> bool:
    """Check the further arguments of `load_state`, and return `strict`.

    Tensors are filled where they are, so `map_location` has no effect.

    Raises:
        TypeError: `map_location` is none of Accelerate's.
        InvalidInput: an argument is not known.
    """
    if arguments.get("map_location") not in _MAP_LOCATIONS:
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or "
            f"`'on_device'`; got {arguments['map_location']!r}. Nothing was loaded."
        )
    unknown = sorted(set(arguments) - _KNOWN_ARGUMENTS)
    if unknown:
        raise InvalidInput(
            f"load_state() got {', '.join(unknown)}, which Holdfast does not support. Nothing was loaded. "
            "Leave it out; strict and map_location are supported."
        )
    return bool(arguments.get("strict", True))
