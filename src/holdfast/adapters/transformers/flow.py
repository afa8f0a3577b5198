"""Callback that brings preemption notices, metrics and exact log entries into the Trainer's loop."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy
from typing_extensions import override

if TYPE_CHECKING:
    from holdfast.adapters.transformers.session import Session
    from holdfast.adapters.transformers.trainer import HoldfastTrainer

_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class FlowCallback(TrainerCallback):
    """Callback of an attached Trainer. It does nothing outside `train`.

    Args:
        trainer: the attached Trainer.
    """

    def __init__(self, trainer: HoldfastTrainer) -> None:
        self._trainer = trainer
        self._saves_at_epoch_end = False

    @property
    def _session(self) -> Session | None:
        return self._trainer.holdfast_session

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Continue the log interval of the checkpoint. The Trainer has just begun a new one."""
        if self._session is not None:
            self._session.begin_loop()

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check for a preemption notice, and choose the moment of the save.

        After a notice an evaluation may take longer than is left, so the next start makes up for it.
        """
        session = self._session
        if session is None:
            return
        session.finish_step(state.global_step)
        is_epoch_end = control.should_epoch_stop or control.should_training_stop or _is_whole(state.epoch)
        if session.must_stop(control):
            session.must_evaluate |= control.should_evaluate
            control.should_evaluate, control.should_save = False, not is_epoch_end
        elif is_epoch_end and control.should_save and _ends_with_epoch(args):
            # The evaluation and the log entry of the epoch follow, and belong to the checkpoint.
            control.should_save, self._saves_at_epoch_end = False, True

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the save that had to wait for the end of the epoch."""
        session = self._session
        if session is None:
            return
        if self._saves_at_epoch_end:
            control.should_save, self._saves_at_epoch_end = True, False
        if session.must_stop(control):
            session.must_evaluate |= control.should_evaluate
            control.should_evaluate, control.should_save = False, True

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the numbers of a log entry, for the report."""
        if self._session is not None:
            self._session.record(
                {
                    name: float(value)
                    for name, value in (logs or {}).items()
                    if isinstance(value, (int, float)) and _METRIC.fullmatch(name) and math.isfinite(value)
                }
            )

    @override
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the save reached Holdfast, and end the process after a preemption notice."""
        if self._session is not None:
            self._session.finish_save(state.global_step)


def _is_whole(epoch: float | None) -> bool:
    return epoch is not None and float(epoch).is_integer()


def _ends_with_epoch(args: TrainingArguments) -> bool:
    """Return True if something is evaluated or logged when an epoch ends."""
    return IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
