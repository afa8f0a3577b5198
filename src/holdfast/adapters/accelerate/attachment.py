"""Attachment of an Accelerator to a home."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator

from holdfast.adapters.accelerate.accelerator import HoldfastAccelerator
from holdfast.adapters.accelerate.batch_position import check_prepared
from holdfast.adapters.accelerate.loader import add_position
from holdfast.adapters.accelerate.settings import Settings, folder_of_checkpoints
from holdfast.adapters.accelerate.support import check_accelerator
from holdfast.adapters.kit.attachment import check_attach, insert_class
from holdfast.adapters.kit.run import HOME
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import InvalidInput

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
    if home is not None:
        parsed = parse_home(home)
        if root is None:
            root = Path.cwd() if "://" in str(parsed.url) else Path(parsed.url).absolute().parent
    else:
        parsed = None if root is None else parse_home(root / HOME)
    attached = insert_class(accelerator, HoldfastAccelerator, before=Accelerator)
    attached.holdfast_settings = Settings(parsed, root, options)
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
