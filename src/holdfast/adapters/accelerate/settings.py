"""Settings of an attached Accelerator: the home of the run, and the options of its Checkpointer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from holdfast.checkpoint.run.options import Home


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one Accelerator. `options` are those of the Checkpointer that it does not decide.

    Attributes:
        home: home of the run; None until the first folder is named, beside which it is.
        root: folder of the folders that are named, if it is known.
        options: options of the Checkpointer.
    """

    home: Home | None
    root: Path | None
    options: Mapping[str, Any]


def folder_of_checkpoints(accelerator: Accelerator) -> Path | None:
    """Return the folder of a run's checkpoints; None if its configuration does not name one."""
    config = accelerator.project_configuration
    if config.project_dir is None:
        return None
    folder = Path(config.project_dir)
    return folder / "checkpoints" if config.automatic_checkpoint_naming else folder
