"""The methods of DeepSpeed's engine that save, load and step, through Holdfast."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from holdfast.adapters.deepspeed.session import SaveArguments, Session
from holdfast.adapters.deepspeed.whole_weights import returning_weights


class HoldfastEngine(DeepSpeedEngine):
    """Engine whose checkpoints are Holdfast's. `attach` puts it before the class of an engine.

    Attributes:
        holdfast_session: the saves and loads of the engine.
    """

    holdfast_session: Session

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint in the background. The arguments are DeepSpeed's.

        Raises:
            InvalidInput: the home holds a run that was not loaded; or a value cannot be saved.
            Preempted: a preemption notice has arrived, and the save is durable: SystemExit with status 75.
            HoldfastError: this save failed, or an earlier one.

        Ranks: collective.
        Blocks: for a copy of the module's weights. The optimizer's memory is copied beside the next forward
            and backward pass, and its next step waits for the copy.
        """
        session = self.holdfast_session
        if save_dir:
            request = SaveArguments(save_dir, tag, save_latest, exclude_frozen_parameters)
            session.begin_save(request, has_client_state=bool(client_state))
        with session.files.collecting(session.commit):
            done = super().save_checkpoint(
                save_dir,
                tag=tag,
                client_state=client_state,
                save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        session.end_save()
        return done

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint. The arguments and results are DeepSpeed's.

        Without a tag it is the newest one that verifies, or the one that DeepSpeed itself has written last.
        With the optimizer, the random number generators are restored too.

        Raises:
            Corrupt: the checkpoint is damaged; without a tag, all are.
            Unsupported: it cannot be loaded in this way; or by this number of ranks, which is a
                ZeRORuntimeException of DeepSpeed too.
            HoldfastError: as `Checkpointer.load`.

        Ranks: collective.
        """
        options = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }
        session = self.holdfast_session
        needs_weights = self.zero_optimization_partition_weights() and not load_optimizer_states
        source = session.find(load_dir, tag, rng=load_optimizer_states and not load_module_only)
        if source is None:
            path, client_state = super().load_checkpoint(load_dir, tag, **options)
            session.continue_after_stock()
        else:
            weights = returning_weights(source.files) if needs_weights else contextlib.nullcontext()
            with weights, session.files.returning(source) as folder:
                path, client_state = super().load_checkpoint(folder, source.facts.tag, **options)
            path = None if path is None else str(Path(load_dir) / Path(path).relative_to(folder))
        return path, client_state

    def step(self, lr_kwargs: Any = None) -> None:
        """Step the optimizer. After a preemption notice, save and end the process.

        Raises:
            Preempted: the save is durable: SystemExit with status 75.
        """
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps != before:
            self.holdfast_session.end_step()
