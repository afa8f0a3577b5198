"""Export to a folder of DeepSpeed's checkpoints, for its scripts and stock engines."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.packed_value import KNOWN, Packed, read_partition, unpack
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.restore.atomic_output import atomic_file, atomic_folder
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.errors import InvalidInput, Unsupported

_META_KEYS = ("deepspeed", "nebula")
"""Keys of the facts about a save: of the adapter for DeepSpeed, and of the block "nebula"."""
_LATEST, _SCRIPT = "latest", "zero_to_fp32.py"


def write_folder(selection: ExportSelection, folder: Path, *, overwrite: bool) -> None:
    """Write the files of all ranks, and then the file `latest`.

    Args:
        selection: a whole checkpoint that an engine of DeepSpeed has saved.
        folder: folder of checkpoints, as for `engine.load_checkpoint`. Created if it does not exist.
        overwrite: replace files of an older export.

    Memory: for one file.
    """
    checkpoint = selection.checkpoint
    key = _meta_key(checkpoint)
    _check(selection)
    tag = checkpoint.values()[key]["tag"]
    target = folder / tag
    target.parent.mkdir(parents=True, exist_ok=True)
    owners = _owners(checkpoint, key)
    with atomic_folder(target, ["*_states.pt"], overwrite=overwrite) as partial:
        for name, rank in owners.items():
            packed = read_partition(checkpoint, rank, key, name)
            _check_classes(packed, name)
            _write(packed, partial / name)
            _note(selection, packed.tensors())
    with atomic_file(folder / _LATEST, overwrite=True) as file:
        file.write_text(tag)
    _copy_script(folder)


def count_tensors(checkpoint: Checkpoint) -> list[int]:
    """Return the bytes of each tensor that an export writes."""
    found: list[int] = []
    for rank in range(checkpoint.world_size):
        shapes = checkpoint.facts(rank)
        found += [
            Shard.whole(name, *shapes[name]).num_bytes for name in shapes if not name.startswith("rng.")
        ]
    return found


def _meta_key(checkpoint: Checkpoint) -> str:
    values: Mapping[str, Any] = checkpoint.values()
    for key in _META_KEYS:
        if isinstance(values.get(key), dict) and "partitions" in values[key]:
            return key
    raise InvalidInput(
        f"Step {checkpoint.step} was not saved by an engine of DeepSpeed. Nothing was written. Export it to "
        "another format, such as torch.",
        step=checkpoint.step,
    )


def _check(selection: ExportSelection) -> None:
    if selection.only is not None or selection.rename:
        raise InvalidInput(
            "A folder for DeepSpeed has all files of all ranks, under DeepSpeed's names. Nothing was "
            "written. Leave only and rename out.",
            step=selection.checkpoint.step,
        )


def _owners(checkpoint: Checkpoint, key: str) -> dict[str, int]:
    """Return the lowest rank that has saved each file."""
    owners: dict[str, int] = {}
    for rank in range(checkpoint.world_size):
        for name in checkpoint.values(rank)[key]["partitions"]:
            owners.setdefault(name, rank)
    return owners


def _check_classes(packed: Packed, name: str) -> None:
    needed = [kind for _, kind, _ in packed.kinds if kind in KNOWN]
    if needed and importlib.util.find_spec("deepspeed") is None:
        raise Unsupported(
            f"{name} has a {needed[0]}, and DeepSpeed is not installed. Nothing was written. Run "
            "pip install deepspeed, as DeepSpeed's own scripts need it too.",
            key=name,
        )


def _write(packed: Packed, path: Path) -> None:
    import torch

    with path.open("wb") as file:
        torch.save(unpack(packed.tree, packed.kinds), file)


def _note(selection: ExportSelection, tensors: Iterable[Any]) -> None:
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    selection.num_bytes += num_bytes
    if selection.on_bytes is not None:
        selection.on_bytes(num_bytes)


def _copy_script(folder: Path) -> None:
    """Copy the script that DeepSpeed leaves beside its checkpoints, if it is installed."""
    package = importlib.util.find_spec("deepspeed")
    for place in (package.submodule_search_locations or ()) if package is not None else ():
        script = Path(place) / "utils" / _SCRIPT
        if script.is_file():
            shutil.copyfile(script, folder / _SCRIPT)
