"""An attached Trainer: its checks, and the methods that save and resume through Holdfast."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils.import_utils import is_torch_xla_available
from typing_extensions import override

from holdfast.adapters.kit.data import DividedBatches
from holdfast.adapters.kit.run import HOME, check_attach, insert_class, warn_of_persistent_workers
from holdfast.adapters.transformers.session import Session
from holdfast.adapters.transformers.state import DataFeed, check_data
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import InvalidInput, ResumeWarning, Unsupported
from holdfast.system.callsite import warn


def check_trainer(trainer: Trainer) -> None:
    """Check the arguments of a Trainer."""
    args = trainer.args
    if trainer.is_deepspeed_enabled:
        raise Unsupported(
            "The Trainer uses DeepSpeed, whose engine saves by itself, so the Trainer was not changed. Use "
            "fsdp= with fsdp_version 2 in place of DeepSpeed, or leave attach() out."
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise Unsupported(
            'The Trainer uses FSDP 1. Nothing was changed. Set fsdp_config={"version": 2} in '
            "TrainingArguments, or fsdp_version: 2 in the configuration of Accelerate."
        )
    if getattr(trainer, "is_fsdp_xla_enabled", False) or is_torch_xla_available():
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


class HoldfastTrainer(Trainer):
    """Trainer whose checkpoints are Holdfast's. `attach` puts it between a class and its `Trainer`.

    While `train` runs, each method does through the session what the method of `Trainer` does with folders.
    At other times, and for folders that the Trainer has written itself, it is the method of `Trainer`.
    """

    holdfast_home: Home
    holdfast_folders: bool | Literal["all"]  # to write at the end of `train`
    holdfast_options: Mapping[str, Any]  # of the Checkpointer
    holdfast_feed: DataFeed | None  # replaces the order of the Trainer's data
    holdfast_session: Session | None = None  # the call of `train` that is running

    @override
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, and resume as `Trainer.train`.

        Args:
            resume_from_checkpoint: True for the newest checkpoint that verifies, of the home and of the
                Trainer's own folders; "auto" for the same, or a new run where there is none; or the path of a
                folder `checkpoint-N`.
            trial: not supported.
            ignore_keys_for_eval: see `Trainer.train`.

        Raises:
            InvalidInput: there is nothing to resume from; or, without `resume_from_checkpoint`, the home
                holds a run.
            Preempted: after a preemption notice, once the save is durable: SystemExit with status 75.
            HoldfastError: a save or a restore failed.

        Ranks: collective.
        """
        if trial is not None:
            raise Unsupported(
                "hyperparameter_search() trains many runs, and a home is for one. Nothing was trained. "
                "Search with a Trainer that is not attached, then attach the one that trains with the values "
                "found."
            )
        with Session(self, ignore_keys_for_eval) as session:
            folder = session.begin(resume_from_checkpoint)
            output = super().train(folder, None, ignore_keys_for_eval)
            session.end()
        return output

    @override
    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data, with the batches that were given to `attach`."""
        loader, feed = super().get_train_dataloader(), self.holdfast_feed
        return loader if feed is None else feed.loader(self, loader)

    @override
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch. The Trainer looks for the end of the training only after a step."""
        if self.holdfast_session is not None and self.holdfast_session.is_complete:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    @property
    def _holdfast_source(self) -> Session | None:
        """Session that resumes from a checkpoint of a home; None with a folder of the Trainer's own."""
        session = self.holdfast_session
        return session if session is not None and session.source is not None else None

    @override
    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if self.holdfast_session is None:
            super()._save_checkpoint(model, trial)
        else:
            self.holdfast_session.save()

    @override
    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        if self._holdfast_source is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._holdfast_source.load_model(model)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._holdfast_source is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self._holdfast_source.load_training()

    @override
    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._holdfast_source is None:
            super()._load_scaler(checkpoint)  # else it was loaded with the optimizer

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._holdfast_source is None:
            super()._load_rng_state(checkpoint)
        else:
            self._holdfast_source.load_generators()

    @override
    def _load_best_model(self) -> None:
        if self.holdfast_session is None or not self.holdfast_session.load_best_model():
            super()._load_best_model()


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
    data: DividedBatches | None = None,
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
    parsed = parse_home(Path(trainer.args.output_dir or ".") / HOME if home is None else home)
    attached = insert_class(trainer, HoldfastTrainer, before=Trainer)
    attached.holdfast_home, attached.holdfast_folders, attached.holdfast_options = parsed, folders, options
    attached.holdfast_feed = None if data is None else DataFeed(data)
    if trainer.args.dataloader_persistent_workers and trainer.args.dataloader_num_workers:
        warn_of_persistent_workers("dataloader_persistent_workers")
    _warn_of_callbacks(trainer)
    return trainer


def _warn_of_callbacks(trainer: Trainer) -> None:
    """Warn of callbacks with a saved state that begin anew at a resume."""
    callbacks = trainer.callback_handler.callbacks
    saved = [type(callback).__name__ for callback in callbacks if isinstance(callback, ExportableState)]
    if saved and not trainer.args.restore_callback_states_from_checkpoint:
        warn(
            f"After a resume {', '.join(saved)} begins anew, so training may stop at another step: the "
            "Trainer saves the state of its callbacks, but restores it only with "
            "restore_callback_states_from_checkpoint=True. Set it in TrainingArguments.",
            ResumeWarning,
        )
