"""Attachment of a Trainer to a home."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import Trainer
from transformers.trainer_callback import ExportableState

from holdfast.adapters.kit.attachment import check_attach, insert_class, warn_of_persistent_workers
from holdfast.adapters.kit.run import HOME
from holdfast.adapters.transformers.data_feed import DataFeed, check_data
from holdfast.adapters.transformers.flow import FlowCallback
from holdfast.adapters.transformers.settings import Settings
from holdfast.adapters.transformers.support import check_trainer
from holdfast.adapters.transformers.trainer import HoldfastTrainer
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.system.callsite import warn
from holdfast.train.data import Batches

_T = TypeVar("_T", bound=Trainer)
_DECIDED = {
    "state": "the Trainer's objects are the state",
    "every": "set save_strategy and save_steps in TrainingArguments",
    "keep": "set save_total_limit in TrainingArguments",
    "group": "the ranks are those of the Trainer",
}


def attach(
    trainer: _T,
    home: str | os.PathLike[str] | Home | None = None,
    *,
    data: Batches[Any] | None = None,
    folders: bool | Literal["all"] = True,
    **options: Any,
) -> _T:
    """Have a Trainer save and resume through Holdfast. Returns the same Trainer.

    Its arguments keep their meaning: `save_strategy`, `save_steps`, `save_total_limit`, `save_only_model`,
    `load_best_model_at_end`, and `resume_from_checkpoint` of `train`. The object gets a class in which
    `HoldfastTrainer` comes directly before `Trainer`: methods of your own subclass, or of TRL's, still run
    first, and their `super()` calls reach Holdfast in place of the Trainer.

    Args:
        trainer: a `Trainer`, `Seq2SeqTrainer`, `SFTTrainer` or an object of another subclass.
        home: folder or URL of the run's checkpoints; by default `holdfast` in the output directory.
        data: order of the training data, such as `GlobalBatches(len(train_dataset), 64)`, which resumes in
            mid-epoch on any number of ranks. It replaces the Trainer's sampler and batch size.
        folders: at the end of `train`, write the newest and the best checkpoint as folders `checkpoint-N`
            that `from_pretrained` and the Trainer itself can read; "all" for every checkpoint that is kept.
        options: other options of `Checkpointer`, such as `local`, `memory`, `preemption` or `limits`.

    Raises:
        InvalidInput: the Trainer is already attached, an option is wrong or decided by its arguments, or
            `data` does not fit them.
        Unsupported: the Trainer saves in a way that Holdfast does not replace, such as with DeepSpeed.

    Ranks: every rank calls it; not collective.
    """
    check_attach(trainer, HoldfastTrainer, options, _DECIDED, name="Trainer")
    if folders not in (True, False, "all"):
        raise InvalidInput(f'folders= is True, False or "all", not {folders!r}. The Trainer was not changed.')
    check_trainer(trainer)
    if data is not None:
        check_data(trainer, data)
    if home is None:
        home = Path(trainer.args.output_dir or ".") / HOME
    settings = Settings(parse_home(home), folders, options, None if data is None else DataFeed(data))
    attached = insert_class(trainer, HoldfastTrainer, before=Trainer)
    attached.holdfast_settings = settings
    attached.add_callback(FlowCallback(attached))
    if trainer.args.dataloader_persistent_workers and trainer.args.dataloader_num_workers:
        warn_of_persistent_workers("dataloader_persistent_workers")
    _warn_of_callbacks(trainer)
    return trainer


def _warn_of_callbacks(trainer: Trainer) -> None:
    """Warn of callbacks with a saved state that begin anew at a resume."""
    saved = [
        type(one).__name__ for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)
    ]
    if saved and not trainer.args.restore_callback_states_from_checkpoint:
        warn(
            f"After a resume {', '.join(saved)} begins anew, so training may stop at another step: the "
            "Trainer saves the state of its callbacks, but restores it only with "
            "restore_callback_states_from_checkpoint=True. Set it in TrainingArguments.",
            ResumeWarning,
        )
