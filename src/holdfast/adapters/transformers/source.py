"""Source of a resumed training: a checkpoint that the Trainer loads piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.adapters.transformers.live_state import (
    DATA,
    GENERATORS,
    MODEL,
    PROGRESS,
    TRAINER_STATE,
    TRAINING,
    Progress,
)
from holdfast.checkpoint.run import Checkpointer
from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.system.callsite import warn


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

        Raises:
            InvalidInput: it does, and `may_lack` is False.
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
