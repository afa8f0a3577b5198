"""State of a Trainer for a Checkpointer: live objects and counters, and their restore piece by piece."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.utils.import_utils import is_peft_available

from holdfast.checkpoint.run import Checkpointer
from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.system.callsite import warn

MODEL = "model"
TRAINING = ("optimizer", "scheduler", "scaler")
"""Keys of what is restored once the Trainer has made it; a Trainer need not have all of them."""
DATA = "data"
TRAINER_STATE = "trainer_state"
PROGRESS = "progress"
GENERATORS = "rng"
_TRL_COUNTERS = ("_total_train_tokens", "_metrics")


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Progress since the last log entry, which the Trainer does not save. Each rank has its own."""

    world_size: int
    logged_step: int
    loss_sum: float  # of the steps since `logged_step`
    must_evaluate: bool  # the run ended before the evaluation of this step
    has_training: bool  # the checkpoint has the optimizer and the scheduler too
    counters: dict[str, Any]  # of a subclass of the Trainer


def live_objects(trainer: Trainer, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return the objects of a Trainer's checkpoint, as far as they exist.

    With `save_only_model` that is the model.

    Args:
        trainer: the Trainer.
        model: module that is trained; by default the Trainer's.
    """
    module: Any = trainer.model if model is None else model
    objects: dict[str, Any] = {MODEL: trained_part(module)}
    if trainer.args.save_only_model:
        return objects
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    found = (optimizer, scheduler, getattr(trainer.accelerator, "scaler", None))
    objects |= {key: one for key, one in zip(TRAINING, found, strict=True) if one is not None}
    return objects


def trained_part(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module to save. Of a PEFT model, it has only the adapters and other trained parts.

    The weights below the adapters are not part of the Trainer's own checkpoints either.
    """
    if not is_peft_model(model):
        return model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return _part(model, trained | _adapter_names(model))


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return True if a model is PEFT's."""
    if not is_peft_available():
        return False
    from peft import PeftMixedModel, PeftModel

    return isinstance(model, (PeftModel, PeftMixedModel))


def _adapter_names(model: Any) -> set[str]:
    """Return the names of the tensors that PEFT saves, of all adapters."""
    from peft import get_peft_model_state_dict

    state = dict(model.state_dict(keep_vars=True))
    saved = {
        id(tensor)
        for adapter in model.peft_config
        for tensor in get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
        ).values()
    }
    return {name for name, tensor in state.items() if id(tensor) in saved}


def _part(model: torch.nn.Module, names: Collection[str]) -> torch.nn.Module:
    """Return a module that has only some tensors of another one: the same objects, under the same names."""
    part = torch.nn.Module()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in names:
            continue
        *path, last = name.split(".")
        inner = part
        for step in path:
            if step not in inner._modules:
                inner.add_module(step, torch.nn.Module())
            inner = inner.get_submodule(step)
        if isinstance(tensor, torch.nn.Parameter):
            inner.register_parameter(last, tensor)
        else:
            inner.register_buffer(last, tensor)
    return part


def trainer_state(trainer: Trainer) -> str:
    """Return the content of `trainer_state.json`, with the state of the callbacks as it is now."""
    stored: Any = trainer.state.stateful_callbacks  # declared as a list, and always a dict
    states: dict[str, list[Any]] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            states.setdefault(type(one).__name__, []).append(one.state())
    for name, found in states.items():
        stored[name] = found if isinstance(stored.get(name), list) else found[-1]
    return json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"


def stops_early(content: str) -> bool:
    """Return True if a callback stopped the training before its last step."""
    state = json.loads(content)
    control = state["stateful_callbacks"].get("TrainerControl") or {}
    newest = control[-1] if isinstance(control, list) else control
    return state["global_step"] < state["max_steps"] and newest["args"]["should_training_stop"]


def read_counters(trainer: Any) -> dict[str, Any]:
    """Return the counters that TRL's trainers keep beside the Trainer's state; {} for another Trainer."""
    tokens, metrics = (getattr(trainer, name, None) for name in _TRL_COUNTERS)
    if not (isinstance(tokens, int) and isinstance(metrics, dict)):
        return {}
    plain = {
        mode: {name: list(values) for name, values in of_mode.items()} for mode, of_mode in metrics.items()
    }
    return dict(zip(_TRL_COUNTERS, (tokens, plain), strict=True))


def write_counters(trainer: Any, counters: dict[str, Any]) -> None:
    """Set the counters of a subclass to those from `read_counters`, if it has them."""
    if not (counters and read_counters(trainer)):
        return
    tokens, metrics = _TRL_COUNTERS
    setattr(trainer, tokens, counters[tokens])
    for mode, values in counters[metrics].items():
        getattr(trainer, metrics)[mode].update(values)


class ResumeSource:
    """A checkpoint that the Trainer resumes from. It has been verified as a whole.

    Args:
        checkpointer: Checkpointer of its home.
        state: state of that Checkpointer, which is filled.
        step: step of the checkpoint.

    Attributes:
        step: step of the checkpoint.
        trainer_state: content of the Trainer's `trainer_state.json`.
        progress: this rank's position between two log entries.
    """

    def __init__(self, checkpointer: Checkpointer, state: Mapping[str, Any], step: int) -> None:
        self.step = step
        self._checkpointer, self._state = checkpointer, state
        self._load([TRAINER_STATE, PROGRESS])
        self.trainer_state: str = state[TRAINER_STATE]
        self.progress = Progress(**state[PROGRESS])

    def load_model(self) -> None:
        """Load the model."""
        self._load([MODEL])

    def load_data(self) -> None:
        """Load the position in the data."""
        self._load([DATA])

    def load_training(self, *, may_lack: bool) -> None:
        """Load optimizer, scheduler and scaler.

        Args:
            may_lack: continue with new ones if the checkpoint consists of the model alone.
        """
        if self.progress.has_training:
            self._load([key for key in TRAINING if key in self._state])
            return
        text = f"Step {self.step} was saved with save_only_model=True, so it has no optimizer or scheduler"
        if not may_lack:
            raise InvalidInput(
                f"{text}. Nothing was resumed. To continue with a new optimizer and a new schedule, set "
                "save_only_model=True again; else resume from another checkpoint.",
                step=self.step,
            )
        warn(f"{text}. The training continues with new ones.", ResumeWarning)

    def load_generators(self) -> None:
        """Load the random number generators."""
        self._load([GENERATORS])

    def _load(self, keys: Collection[str]) -> None:
        self._checkpointer.restore(self.step, only=keys)
