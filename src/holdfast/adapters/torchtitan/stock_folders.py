"""Checkpoints in a folder that torchtitan's own manager wrote."""

# torchtitan has no type information where it is not installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import pickle
import re
from collections.abc import Collection

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchtitan.tools import filesystem

from holdfast.errors import Corrupt

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")  # without the zeros of a folder of Holdfast
_METADATA = ".metadata"
_HF_INDEX = "model.safetensors.index.json"
_DAMAGE = (EOFError, LookupError, AttributeError, ImportError, ValueError, pickle.UnpicklingError)
"""Errors of a reader whose metadata is damaged."""


def steps(folder: str) -> list[int]:
    """Return the steps of complete DCP checkpoints in a folder, newest first."""
    return _steps_with(folder, _METADATA)


def exported_steps(folder: str) -> list[int]:
    """Return the steps of Hugging Face folders in a folder, newest first."""
    return _steps_with(folder, _HF_INDEX)


def _steps_with(folder: str, name: str) -> list[int]:
    if not filesystem.isdir(folder):
        return []
    found = (_STEP.fullmatch(entry.rstrip("/")) for entry in filesystem.listdir(folder))
    numbers = [match[1] for match in found if match]
    paths = {int(one): filesystem.join(filesystem.join(folder, f"step-{one}"), name) for one in numbers}
    return sorted((step for step, path in paths.items() if filesystem.isfile(path)), reverse=True)


def is_resumable(folder: str, step: int, names: Collection[str]) -> bool:
    """Return True if a DCP checkpoint contains more than a model, or may do so.

    Args:
        names: states of the trainer besides the model.
    """
    path = filesystem.join(folder, f"step-{step}")
    if step == 0 or filesystem.is_remote(path):  # a seed; or one whose content only the load itself reads
        return True
    try:
        keys = _read_keys(path)
    except _DAMAGE:  # the load itself names the damage, if nothing newer takes its place
        return True
    return any(key == name or key.startswith(f"{name}.") for key in keys for name in names)


def check_metadata(folder: str, step: int) -> None:
    """Check that the metadata of a DCP checkpoint can be read.

    Raises:
        Corrupt: it is damaged.
    """
    path = filesystem.join(folder, f"step-{step}")
    if filesystem.is_remote(path):
        return
    try:
        _read_keys(path)
    except _DAMAGE as error:
        raise Corrupt(
            f"{path}/.metadata, which torchtitan's own manager wrote, is damaged: {error}. Nothing was "
            "loaded. Move that folder away to resume from an older checkpoint.",
            step=step,
            key=path,
        ) from error


def _read_keys(path: str) -> Collection[str]:
    return FileSystemReader(path).read_metadata().state_dict_metadata
