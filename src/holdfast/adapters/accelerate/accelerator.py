"""The methods of `Accelerator` that save and load, through Holdfast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from typing_extensions import override

from holdfast.adapters.accelerate.batch_position import BatchPosition, batches_of, prepare_batches
from holdfast.adapters.accelerate.data_position import UnpreparedGenerators
from holdfast.adapters.accelerate.loader import add_position, follow_position
from holdfast.adapters.accelerate.session import Session
from holdfast.adapters.accelerate.settings import Settings
from holdfast.adapters.accelerate.support import check_load_arguments
from holdfast.adapters.kit.run import HOME
from holdfast.checkpoint.run.options import parse_home
from holdfast.errors import InvalidInput

if TYPE_CHECKING:
    import torch


class HoldfastAccelerator(Accelerator):
    """Accelerator that saves and loads with Holdfast. `attach` inserts it before the class `Accelerator`.

    Attributes:
        holdfast_settings: settings given to `attach`.
        holdfast_session: saves and loads; None while the home is not known, and after `end_training`.
    """

    holdfast_settings: Settings
    holdfast_session: Session | None = None

    def open_session(self, folder: str | os.PathLike[str] | None = None) -> Session:
        """Return the session, which is opened at the first call.

        Args:
            folder: folder beside which the home is, if it is not known.

        Raises:
            InvalidInput: the home is not known, and no folder is named.

        Ranks: collective.
        """
        if self.holdfast_session is None or not self.holdfast_session.is_open:
            settings = self.holdfast_settings
            if settings.home is None:
                if folder is None:
                    raise InvalidInput(
                        "Neither a folder is named nor automatic_checkpoint_naming is set. Nothing was done. "
                        "Pass a folder, or set project_dir and automatic_checkpoint_naming in "
                        "ProjectConfiguration."
                    )
                root = Path(folder).absolute().parent
                settings = Settings(parse_home(root / HOME), root, settings.options)
                self.holdfast_settings = settings
            self.holdfast_session = Session(self, settings)
        return self.holdfast_session

    @override
    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save the state like `Accelerator.save_state`, and return the folder that names the checkpoint.

        Args:
            output_dir: the folder; needed without `automatic_checkpoint_naming`.
            safe_serialization: has no effect, since tensors are always stored as safetensors.
            save_model_func_kwargs: have no effect, as without DeepSpeed.

        Raises:
            InvalidInput: the folder exists already; or the home holds a run that was not loaded.
            Preempted: after a preemption notice, once the save is durable: SystemExit with status 75.
            HoldfastError: as `Checkpointer.save`.

        Ranks: collective.
        Blocks: until what no optimizer owns is copied, and for a small exchange of the ranks.
        """
        return self.open_session(output_dir).save(output_dir)

    @override
    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a state like `Accelerator.load_state`.

        Args:
            input_dir: folder that `save_state` has named, with or without Holdfast; by default the newest
                one that verifies.
            load_kwargs: arguments for reading pickles in folders that Accelerate has written itself.
            load_model_func_kwargs: `strict`; for folders of Accelerate's own, all that it takes.

        Raises:
            InvalidInput: there is nothing to load, or the state differs from the one that was saved.
            HoldfastError: as `Checkpointer.restore`.

        Ranks: collective.
        """
        session = self.open_session(input_dir)
        folder = session.choose(input_dir)
        if folder is None:
            session.load(strict=check_load_arguments(load_model_func_kwargs))
        else:
            super().load_state(folder, load_kwargs, **load_model_func_kwargs)
            session.continue_after(folder)

    @override
    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a data loader, whose position is then part of the state.

        Loaders with GlobalBatches keep them, since these divide the data among the ranks themselves.
        """
        if batches_of(data_loader) is None or getattr(data_loader, "_is_accelerate_prepared", False):
            before = UnpreparedGenerators(data_loader)
            return add_position(super().prepare_data_loader(data_loader, *args, **kwargs), before)
        on_device = args[0] if args else kwargs.get("device_placement")
        return add_position(prepare_batches(self, data_loader, on_device=on_device))

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches. After a load, it continues the checkpoint's pass.

        A loader with GlobalBatches is at its position already, and is returned itself.
        """
        position = getattr(dataloader, "holdfast_position", None)
        if isinstance(position, BatchPosition):
            return dataloader if position.check_skip(num_batches) else ()
        return follow_position(
            super().skip_first_batches(dataloader, num_batches), dataloader, continues=num_batches > 0
        )

    @override
    def free_memory(self, *objects: torch.nn.Module) -> Any:
        """Release all references to prepared objects, once the last save does not need them."""
        if self.holdfast_session is not None:
            self.holdfast_session.forget()
        return super().free_memory(*objects)

    @override
    def end_training(self) -> None:
        """Wait until all saves are durable, then end the training.

        Ranks: collective.
        """
        session, self.holdfast_session = self.holdfast_session, None
        if session is not None and session.is_open:
            session.close()
        super().end_training()
