"""An attached engine of DeepSpeed: its checks, and the methods that save, load and step through Holdfast."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from holdfast.adapters.deepspeed.resharding import returning_weights
from holdfast.adapters.deepspeed.session import Session
from holdfast.adapters.kit.attachment import check_attach, insert_class
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import InvalidInput, Unsupported


def check_engine(engine: Any) -> None:
    """Check that an object is an engine that Holdfast can save."""
    if not isinstance(engine, DeepSpeedEngine):
        hint = ""
        if isinstance(engine, tuple):
            hint = " deepspeed.initialize() returns a tuple, whose first element is the engine."
        raise InvalidInput(
            f"attach() needs the engine of deepspeed.initialize(), not a {type(engine).__name__}.{hint} "
            "Nothing was changed."
        )
    if isinstance(engine, PipelineEngine):
        raise Unsupported(
            "Pipeline engines are not supported: they write their layers without the engine's checkpoint "
            "names. The engine was not changed. Leave attach() out, and save as DeepSpeed does."
        )
    offload = engine.zero_offload_param()
    device = None if offload is None else str(getattr(offload.device, "value", offload.device))
    if engine.zero_nvme_offload_optimizer() or device == "nvme":
        raise Unsupported(
            "The engine keeps state in files of its own (offload to NVMe), which Holdfast does not save. "
            'The engine was not changed. Offload to "cpu", or leave attach() out.'
        )
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise InvalidInput(
            f"The configuration of DeepSpeed chooses {type(engine.checkpoint_engine).__name__} to write "
            'checkpoints. The engine was not changed. Remove "checkpoint": {"writer": ...} and '
            '"datastates_ckpt" from the configuration: Holdfast already writes in the background.'
        )


class HoldfastEngine(DeepSpeedEngine):
    """Engine whose checkpoints are Holdfast's. `attach` puts it before the class of an engine."""

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
        request = {
            "save_dir": save_dir,
            "tag": tag,
            "save_latest": save_latest,
            "exclude_frozen_parameters": exclude_frozen_parameters,
        }
        if save_dir:
            session.begin_save(request, has_client_state=bool(client_state))
        with session.files.collecting(session.commit):
            done = super().save_checkpoint(client_state=client_state, **request)
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
        parts = load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        session = self.holdfast_session
        needs_weights = self.zero_optimization_partition_weights() and not load_optimizer_states
        source = session.find(load_dir, tag, rng=load_optimizer_states and not load_module_only)
        if source is None:
            path, client_state = super().load_checkpoint(load_dir, tag, load_module_strict, *parts)
            session.continue_after_stock()
        else:
            weights = returning_weights(source.files) if needs_weights else contextlib.nullcontext()
            with weights, session.files.returning(source) as folder:
                found_tag = source.facts.tag
                path, client_state = super().load_checkpoint(folder, found_tag, load_module_strict, *parts)
            path = None if path is None else str(Path(load_dir) / Path(path).relative_to(folder))
        return path, client_state

    def step(self, lr_kwargs: Any = None) -> None:
        """Step the optimizer. After a preemption notice, save and end the process by `Preempted`."""
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps != before:
            self.holdfast_session.end_step()


_T = TypeVar("_T")
_DECIDED = {
    "state": "the engine's objects are the state",
    "every": "call engine.save_checkpoint() when a save is due",
    "group": "the ranks are those of the engine",
}


def attach(
    engine: _T,
    home: str | os.PathLike[str] | Home | None = None,
    *,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
    **options: Any,
) -> _T:
    """Have an engine save and load through Holdfast. Returns the same engine.

    `save_checkpoint` and `load_checkpoint` keep their arguments. The object gets a class in which
    `HoldfastEngine` comes directly before its own.

    Args:
        engine: engine of `deepspeed.initialize`.
        home: folder or URL of the run's checkpoints; by default `holdfast` in the folder that is given to
            `save_checkpoint` and `load_checkpoint`.
        client_state: returns the client state of the save after a preemption notice. Without it that save
            waits for the next call of `save_checkpoint`, unless the last one did not have a client state.
        options: other options of `Checkpointer`, such as `keep`, `memory` or `preemption`. By default all
            checkpoints are kept, as by DeepSpeed.

    Raises:
        InvalidInput: the object is not an engine, is already attached, or an option does not fit.
        Unsupported: the engine keeps its state in a way that Holdfast does not save.

    Ranks: every rank calls it; not collective.
    """
    check_attach(engine, HoldfastEngine, options, _DECIDED, name="engine")
    if options.get("local") is not None:
        raise Unsupported(
            "attach() does not take local=: a rank loads files that another rank has saved, so all are read "
            "from home. The engine was not changed. Leave local= out."
        )
    if client_state is not None and not callable(client_state):
        raise InvalidInput(
            f"client_state= must be a function that returns the client state, got "
            f"{type(client_state).__name__}. The engine was not changed. Write client_state=lambda: ..."
        )
    check_engine(engine)
    parsed = None if home is None else parse_home(home)
    attached = insert_class(engine, HoldfastEngine, before=type(engine))
    attached.holdfast_session = Session(attached, parsed, client_state, options)
    return engine
