"""Checks that a Trainer can save through Holdfast, with the fix where it cannot."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from holdfast.errors import InvalidInput, Unsupported


def check_trainer(trainer: Trainer) -> None:
    """Check the arguments of a Trainer.

    Raises:
        InvalidInput: two arguments exclude each other.
        Unsupported: Holdfast does not replace the way in which this Trainer saves.
    """
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise Unsupported(
            "The Trainer uses DeepSpeed, whose engine saves by itself, so the Trainer was not changed. Use "
            "fsdp= with fsdp_version 2 in place of DeepSpeed, or leave attach() out."
        )
    if trainer.is_fsdp_enabled and _fsdp_version(trainer) != 2:
        raise Unsupported(
            'The Trainer uses FSDP 1. Nothing was changed. Set fsdp_config={"version": 2} in '
            "TrainingArguments, or fsdp_version: 2 in the configuration of Accelerate."
        )
    if getattr(trainer, "is_fsdp_xla_enabled", False) or _is_on_tpu():
        raise Unsupported(
            "Training on TPUs is not supported. The Trainer was not changed. Leave attach() out."
        )
    if args.enable_jit_checkpoint:
        raise InvalidInput(
            "enable_jit_checkpoint=True also saves after SIGTERM, in the middle of a step. The Trainer was "
            "not changed. Leave it out of TrainingArguments: Holdfast already saves after SIGTERM."
        )
    if args.save_strategy == SaveStrategy.NO:
        raise InvalidInput(
            'save_strategy="no" leaves nothing to save or to resume. The Trainer was not changed. Set '
            'save_strategy="steps" and save_steps in TrainingArguments, or leave attach() out.'
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise Unsupported(
            "The model was sharded while it was loaded, and the Trainer cannot resume such a training. The "
            "Trainer was not changed. Use fsdp= with fsdp_version 2, or leave attach() out."
        )


def check_call(trial: Any) -> None:
    """Check the arguments of one call of `train`.

    Raises:
        Unsupported: it is a trial of a hyperparameter search.
    """
    if trial is not None:
        raise Unsupported(
            "hyperparameter_search() trains many runs, and a home is for one. Nothing was trained. Search "
            "with a Trainer that is not attached, then attach the one that trains with the values found."
        )


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer has state that can be saved.

    Raises:
        Unsupported: each layer has an optimizer of its own, which the Trainer cannot reach.
    """
    if type(optimizer).__name__ == "LayerWiseDummyOptimizer":
        raise Unsupported(
            "A layerwise optimizer keeps its state in hooks of the parameters, and neither the Trainer nor "
            "Holdfast can save it. Nothing was trained. Use the variant that is not layerwise, such as "
            'optim="galore_adamw".'
        )


def _fsdp_version(trainer: Trainer) -> int:
    return getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)


def _is_on_tpu() -> bool:
    from transformers.utils.import_utils import is_torch_xla_available

    return is_torch_xla_available()
