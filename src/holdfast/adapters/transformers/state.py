"""State of a Trainer for a Checkpointer: live objects, counters, and global batches with their position."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from typing import Any

import torch
from msgspec import Struct
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.utils.import_utils import is_peft_available

from holdfast.adapters.kit.data import DividedBatches, prepare_undivided
from holdfast.adapters.kit.run import unwrapped
from holdfast.errors import InvalidInput, Unsupported

MODEL = "model"
TRAINING = ("optimizer", "scheduler", "scaler")
"""Keys of what is restored once the Trainer has made it; a Trainer need not have all of them."""
DATA = "data"
TRAINER_STATE = "trainer_state"
PROGRESS = "progress"
GENERATORS = "rng"
_TRL_COUNTERS = ("_total_train_tokens", "_metrics")


class Progress(Struct, frozen=True):
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
    """
    module: Any = trainer.model if model is None else model
    objects: dict[str, Any] = {MODEL: trained_part(module)}
    if trainer.args.save_only_model:
        return objects
    scaler = getattr(trainer.accelerator, "scaler", None)
    found = unwrapped(trainer.optimizer), unwrapped(trainer.lr_scheduler), scaler
    objects |= {key: one for key, one in zip(TRAINING, found, strict=True) if one is not None}
    return objects


def trained_part(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module to save. Of a PEFT model, it has only the adapters and other trained parts.

    The weights below the adapters are not part of the Trainer's own checkpoints either.
    """
    if not is_peft_available():
        return model
    from peft import PeftMixedModel, PeftModel, get_peft_model_state_dict

    if not isinstance(model, (PeftModel, PeftMixedModel)):
        return model
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    for adapter in model.peft_config:
        of_adapter = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
        )
        saved = {id(tensor) for tensor in of_adapter.values()}
        names |= {name for name, tensor in state.items() if id(tensor) in saved}
    return _part(model, names)


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
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        (inner.register_parameter if is_parameter else inner.register_buffer)(last, tensor)
    return part


def trainer_state(trainer: Trainer) -> str:
    """Return the content of `trainer_state.json`, with the state of the callbacks as it is now."""
    stored: Any = trainer.state.stateful_callbacks  # declared as a list, and always a dict
    states: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
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
    plain = {mode: {name: list(row) for name, row in rows.items()} for mode, rows in metrics.items()}
    return dict(zip(_TRL_COUNTERS, (tokens, plain), strict=True))


def write_counters(trainer: Any, counters: dict[str, Any]) -> None:
    """Set the counters of a subclass to those from `read_counters`, if it has them."""
    if counters and read_counters(trainer):
        tokens, metrics = _TRL_COUNTERS
        setattr(trainer, tokens, counters[tokens])
        for mode, values in counters[metrics].items():
            getattr(trainer, metrics)[mode].update(values)


_LOADER_OPTIONS = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)


class DataFeed:
    """Batch sampler of the Trainer's loader. Its state is that of the batches.

    After a resume, the Trainer skips the batches of the epoch that were used. The batches are at the next one
    already, so it gets empty ones to skip.
    """

    def __init__(self, batches: DividedBatches) -> None:
        self.batches = batches
        self.batch_size = batches.batch_size // batches.accumulation_steps
        self._step = 0  # steps that the batches have counted
        self._num_passed = 0  # batches that the Trainer is about to skip

    def __iter__(self) -> Iterator[list[Any]]:
        num_passed, self._num_passed = self._num_passed, 0
        for _ in range(num_passed):
            yield []
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)

    def begin(self, step: int) -> None:
        """Begin to train after a step, which the Trainer and the batches have reached."""
        self._step = step
        self._num_passed = step * self.batches.accumulation_steps % len(self.batches)
        self.batches.complete_steps(0)

    def reach(self, step: int) -> None:
        """Record that all steps up to this one are complete."""
        num_steps, self._step = step - self._step, step
        self.batches.complete_steps(num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the batches."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position of the batches."""
        self.batches.load_state_dict(state)

    def loader(self, trainer: Trainer, stock: Any) -> DataLoader[Any]:
        """Return a loader like the Trainer's own that reads this feed, undivided."""
        options = {name: getattr(stock, name) for name in _LOADER_OPTIONS}
        accelerator = trainer.accelerator
        own: Any = self
        prepared = prepare_undivided(accelerator, DataLoader(stock.dataset, batch_sampler=own, **options))
        others = [one for one in accelerator._dataloaders if one is not stock]
        accelerator._dataloaders = [*others, prepared]
        return prepared


def check_data(trainer: Trainer, batches: Any) -> None:
    """Check that batches fit a Trainer."""
    if not isinstance(batches, DividedBatches):
        raise InvalidInput(
            f"attach(data=...) takes GlobalBatches or a relative, not {type(batches).__name__}. The Trainer "
            "was not changed. Pass data=GlobalBatches(len(trainer.train_dataset), 64)."
        )
    dataset = trainer.train_dataset
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise Unsupported(
            "attach(data=...) needs a train_dataset with a length, which is read by index. The Trainer was "
            "not changed. Leave data= out: a stream has an order of its own."
        )
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise Unsupported(
            "attach(data=...) divides each batch among all ranks, but with tensor, context or sequence "
            "parallelism some need the same samples. The Trainer was not changed. Leave data= out."
        )
    if (fault := next(_faults(trainer.args, dataset, batches), None)) is not None:
        raise InvalidInput(f"data= does not fit the Trainer: {fault}. The Trainer was not changed.")


def _faults(args: Any, dataset: Any, batches: DividedBatches) -> Iterator[str]:
    num_samples = getattr(batches, "num_samples", len(dataset))
    mine, theirs = (batches.rank, batches.world_size), (args.process_index, args.world_size)
    if mine != theirs:
        yield (
            f"it is for rank {mine[0]} of {mine[1]}, and this is rank {theirs[0]} of {theirs[1]}. "
            "Make it after TrainingArguments, which start the process group"
        )
    if num_samples != len(dataset):
        text = f"it is for {num_samples} samples, and train_dataset has {len(dataset)}"
        yield f"{text}. Pass len(train_dataset)"
    if batches.accumulation_steps != args.gradient_accumulation_steps:
        yield (
            f"it has accumulation_steps={batches.accumulation_steps}, and TrainingArguments have "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}. Set the same number"
        )
    if args.ignore_data_skip:
        yield "ignore_data_skip=True begins the data anew after a resume. Leave it out: nothing is read again"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True changes the size of batches, which data= decides. Leave it out"
