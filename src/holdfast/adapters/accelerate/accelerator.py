"""An attached Accelerator: its checks, and the methods that save and load through Holdfast."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import DistributedType
from typing_extensions import override

from holdfast.adapters.accelerate.session import Session
from holdfast.adapters.accelerate.state import (
    DataPosition,
    UnpreparedGenerators,
    add_position,
    batches_of,
    check_prepared,
    follow_position,
    prepare_batches,
)
from holdfast.adapters.kit.attachment import check_attach, insert_class
from holdfast.adapters.kit.run import HOME
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    import torch


def folder_of_checkpoints(accelerator: Accelerator) -> Path | None:
    """Return the folder of a run's checkpoints; None if its configuration does not name one."""
    config = accelerator.project_configuration
    if config.project_dir is None:
        return None
    folder = Path(config.project_dir)
    return folder / "checkpoints" if config.automatic_checkpoint_naming else folder


_KNOWN_ARGUMENTS = frozenset({"map_location", "strict"})
_MAP_LOCATIONS = (None, "cpu", "on_device")


def check_accelerator(accelerator: Accelerator) -> None:
    """Check the kind of training that an Accelerator is configured for."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        name = "DeepSpeed" if kind == DistributedType.DEEPSPEED else "Megatron-LM"
        raise Unsupported(
            f"The Accelerator uses {name}, whose engine saves by itself, so it was not changed. Use FSDP2 in "
            f"place of {name} (FullyShardedDataParallelPlugin(fsdp_version=2)), or leave attach() out."
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise Unsupported(
            "The Accelerator uses FSDP 1, so it was not changed. Set fsdp_version: 2 in its configuration, "
            "or FullyShardedDataParallelPlugin(fsdp_version=2) in the script."
        )
    if kind == DistributedType.XLA:
        raise Unsupported(
            "Training on TPUs is not supported. The Accelerator was not changed. Leave attach() out."
        )
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and config.project_dir is None:
        raise InvalidInput(
            "automatic_checkpoint_naming=True needs a folder for the checkpoints. The Accelerator was not "
            "changed. Set project_dir in ProjectConfiguration or in Accelerator."
        )


def check_load_arguments(arguments: dict[str, Any]) -> bool:
    """Check the further arguments of `load_state`, and return `strict`.

    Tensors are filled where they are, so `map_location` has no effect.
    """
    if arguments.get("map_location") not in _MAP_LOCATIONS:
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or "
            f"`'on_device'`; got {arguments['map_location']!r}. Nothing was loaded."
        )
    unknown = sorted(set(arguments) - _KNOWN_ARGUMENTS)
    if unknown:
        raise InvalidInput(
            f"load_state() got {', '.join(unknown)}, which Holdfast does not support. Nothing was loaded. "
            "Leave it out; strict and map_location are supported."
        )
    return bool(arguments.get("strict", True))


class HoldfastAccelerator(Accelerator):
    """Accelerator that saves and loads with Holdfast. `attach` inserts it before the class `Accelerator`."""

    holdfast_home: Home | None  # None until the first folder is named, beside which it is
    holdfast_root: Path | None  # folder of the folders that are named, if it is known
    holdfast_options: Mapping[str, Any]  # of the Checkpointer
    holdfast_session: Session | None = None  # None while the home is not known, and after `end_training`

    def open_session(self, folder: str | os.PathLike[str] | None = None) -> Session:
        """Return the session, which the first call opens. An unknown home is then beside `folder`.

        Ranks: collective.
        """
        if self.holdfast_session is None or not self.holdfast_session.is_open:
            if self.holdfast_home is None or self.holdfast_root is None:
                if folder is None:
                    raise InvalidInput(
                        "Neither a folder is named nor automatic_checkpoint_naming is set. Nothing was done. "
                        "Pass a folder, or set project_dir and automatic_checkpoint_naming in "
                        "ProjectConfiguration."
                    )
                self.holdfast_root = Path(folder).absolute().parent
                self.holdfast_home = parse_home(self.holdfast_root / HOME)
            self.holdfast_session = Session(
                self, self.holdfast_home, self.holdfast_root, self.holdfast_options
            )
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
        if isinstance(position, DataPosition) and position.batches is not None:
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


_T = TypeVar("_T", bound=Accelerator)
_DECIDED = {
    "state": "what the Accelerator has prepared and registered is the state",
    "every": "call save_state when the script wants to save",
    "keep": "set total_limit in ProjectConfiguration, or delete folders",
    "group": "the ranks are those of the Accelerator",
}


def attach(accelerator: _T, home: str | os.PathLike[str] | Home | None = None, **options: Any) -> _T:
    """Have an Accelerator save and load its state through Holdfast. Returns the same Accelerator.

    Everything that `save_state` and `load_state` take keeps its meaning: folders, hooks, registered objects,
    `automatic_checkpoint_naming` and `total_limit`. `save_state` returns when the state is copied, or about
    to be copied beside training. The folder that it names holds the name of a checkpoint in the home.

    If the home holds a run, the folders of its checkpoints are made to agree with it: those of interrupted
    saves are removed, and missing ones are made again.

    Args:
        accelerator: an `Accelerator`, before or after `prepare`.
        home: folder or URL of the run's checkpoints; by default `holdfast` beside their folders.
        options: other options of `Checkpointer`, such as `local`, `memory`, `preemption` or `limits`.

    Raises:
        InvalidInput: the Accelerator is already attached, or an option is decided by its configuration.
        Unsupported: the Accelerator saves in a way that Holdfast does not replace, such as with DeepSpeed.
        HoldfastError: the home cannot be read.

    Ranks: collective.
    """
    check_attach(accelerator, HoldfastAccelerator, options, _DECIDED, name="Accelerator")
    check_accelerator(accelerator)
    for loader in accelerator._dataloaders:
        check_prepared(loader)
    root = folder_of_checkpoints(accelerator)
    parsed = parse_home(home) if home is not None else None if root is None else parse_home(root / HOME)
    if parsed is not None and root is None:
        root = Path.cwd() if "://" in str(parsed.url) else Path(parsed.url).absolute().parent
    attached = insert_class(accelerator, HoldfastAccelerator, before=Accelerator)
    attached.holdfast_home, attached.holdfast_root, attached.holdfast_options = parsed, root, options
    for loader in accelerator._dataloaders:
        add_position(loader)
    if parsed is not None:
        attached.open_session()
    return accelerator


def is_preempted(accelerator: Accelerator) -> bool:
    """Return True after a preemption notice, on all ranks at the same call.

    The next `save_state` saves, waits until that is durable, and ends the process with status 75. A script
    that saves rarely calls it after each step: `if is_preempted(accelerator): accelerator.save_state(...)`.

    Raises:
        InvalidInput: the Accelerator is not attached.

    Ranks: collective; every rank calls it equally often.
    Blocks: hardly; with several ranks the result is that of the call before.
    """
    if not isinstance(accelerator, HoldfastAccelerator):
        raise InvalidInput("This Accelerator is not attached. Call attach(accelerator) first.")
    return accelerator.holdfast_session is not None and accelerator.holdfast_session.is_preempted()
