"""The methods of `Trainer` that save and resume, through Holdfast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from typing_extensions import override

from holdfast.adapters.transformers.session import Session
from holdfast.adapters.transformers.support import check_call

if TYPE_CHECKING:
    from holdfast.adapters.transformers.settings import Settings


class HoldfastTrainer(Trainer):
    """Trainer whose checkpoints are Holdfast's. `attach` puts it between a class and its `Trainer`.

    While `train` runs, each method does through the session what the method of `Trainer` does with folders.
    At other times, and for folders that the Trainer has written itself, it is the method of `Trainer`.

    Attributes:
        holdfast_settings: settings given to `attach`.
        holdfast_session: the call of `train` that is running; None otherwise.
    """

    holdfast_settings: Settings
    holdfast_session: Session | None = None

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
        check_call(trial)
        with Session(self, self.holdfast_settings, ignore_keys_for_eval) as session:
            self.holdfast_session = session
            try:
                folder = session.begin(resume_from_checkpoint)
                output = super().train(folder, None, ignore_keys_for_eval)
                session.end()
            finally:
                self.holdfast_session = None
        return output

    @override
    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data, with the batches that were given to `attach`."""
        loader, feed = super().get_train_dataloader(), self.holdfast_settings.feed
        return loader if feed is None else feed.loader(self, loader)

    @override
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch. The Trainer looks for the end of the training only after a step."""
        if self.holdfast_session is not None and self.holdfast_session.is_complete:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

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
        if self.holdfast_session is None or not self.holdfast_session.restores:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.holdfast_session.load_model(model)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.holdfast_session is None or not self.holdfast_session.restores:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self.holdfast_session.load_training()

    @override
    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.holdfast_session is None or not self.holdfast_session.restores:
            super()._load_scaler(checkpoint)  # else it was loaded with the optimizer

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.holdfast_session is None or not self.holdfast_session.restores:
            super()._load_rng_state(checkpoint)
        else:
            self.holdfast_session.load_generators()

    @override
    def _load_best_model(self) -> None:
        if self.holdfast_session is None or not self.holdfast_session.load_best_model():
            super()._load_best_model()
