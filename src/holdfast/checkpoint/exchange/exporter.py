"""Export of a checkpoint to other formats."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint.exchange import deepspeed_export, safetensors_export, torch_export, trainer_export
from holdfast.checkpoint.exchange.export_names import check_step, choose_kind
from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.system.linux.partial_files import remove_partial_files
from holdfast.system.units import parse_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export. `num_bytes` counts bytes of tensors."""

    path: str
    step: int
    kind: str
    num_tensors: int
    num_bytes: int
    seconds: float


def export_checkpoint(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    max_shard_bytes: int | str = "5GB",
    rank: int = 0,
    overwrite: bool = False,
    num_threads: int = 4,
    on_total: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Exported:
    """Export a checkpoint, or a part of it, to another format. Every byte is verified.

    safetensors files and Hugging Face folders contain only tensors; a folder for the Trainer or for
    DeepSpeed has all that they resume from. Files of torch.save and DCP folders
    contain the values too, as plain Python values: arrays become lists, paths become strings.

    Memory: about 65 MiB in addition to torch, for any size; for DeepSpeed its largest file.

    Args:
        checkpoint: checkpoint from `holdfast.open`.
        path: file or folder to write; its parent must exist. A name such as `checkpoint-500` must have the
            step's number.
        kind: one of `export_names.KINDS`; by default the one of the suffix: .safetensors, or .pt and others
            for torch.
        only: prefixes of the names to export ("model" includes "model.weight"). By default everything is
            exported.
        rename: new prefix by old prefix; "" removes a prefix with its dot. For torch and DCP, whose trees
            are nested, only top-level keys can be renamed.
        max_shard_bytes: maximum bytes of tensors in a shard of a Hugging Face folder, such as "5GB".
        rank: rank whose per-rank tensors and values are exported.
        overwrite: replace an older export.
        num_threads: threads that read and hash.
        on_total: called once with the size of all tensors in bytes, before they are read.
        on_bytes: called with a number of bytes after they have been verified.

    Raises:
        Conflict: the destination exists and `overwrite` is False.
        NotFound: the checkpoint has no names with a prefix of `only`, or one of its files is missing.
        InvalidInput: the kind is unknown, the name of the path contradicts it or the step, two tensors get
            the same name, or the path is invalid.
        Corrupt: the checkpoint is damaged. Nothing was written.
        RetryLater: the store failed, or the destination could not be written.

    Ranks: not collective. Call it in one process.
    Blocks: until the export is durable.
    """
    began = time.perf_counter()
    target, limit = Path(path).expanduser(), parse_bytes(max_shard_bytes, "max_shard_bytes")
    kind = choose_kind(target, kind)
    check_step(target, checkpoint.step)
    selection = ExportSelection.choose(
        checkpoint, rank=rank, only=only, rename=rename, num_threads=num_threads
    )
    selection.on_bytes = on_bytes
    writers: dict[str, Callable[[], None]] = {
        "safetensors": lambda: safetensors_export.write_file(selection, target, overwrite=overwrite),
        "hf": lambda: safetensors_export.write_folder(
            selection, target, max_shard_bytes=limit, overwrite=overwrite
        ),
        "torch": lambda: torch_export.write_file(selection, target, overwrite=overwrite),
        "dcp": lambda: torch_export.write_folder(selection, target, overwrite=overwrite),
        "trainer": lambda: trainer_export.write_folder(
            selection, target, max_shard_bytes=limit, overwrite=overwrite
        ),
        "deepspeed": lambda: deepspeed_export.write_folder(selection, target, overwrite=overwrite),
    }
    sizes = _sizes(selection, kind)
    if on_total is not None:
        on_total(sum(sizes))
    writers[kind]()
    count = len(sizes) if kind == "deepspeed" else len(selection.tensors)
    seconds = time.perf_counter() - began
    return Exported(str(target), checkpoint.step, kind, count, selection.num_bytes, seconds)


def _sizes(selection: ExportSelection, kind: str) -> list[int]:
    """Return the bytes of each tensor that is written."""
    if kind == "deepspeed":
        return deepspeed_export.count_tensors(selection.checkpoint)
    shared = kind in ("torch", "dcp")
    return [
        tensor.num_bytes
        for name, tensor in selection.tensors.items()
        if not shared or selection.original(name) == name
    ]


def map_weights(checkpoint: Checkpoint, key: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of a saved module: whole tensors, verified, in a mapped file.

    The system drops their pages when memory is short, and reads them again. Tied tensors are the same object.

    Args:
        checkpoint: from `holdfast.open`.
        key: key of the module in the saved state.
        folder: where the file is written. It has no name any more when this returns, and its space is free
            when the tensors are.
    """
    from safetensors.torch import load_file

    remove_partial_files(folder)  # also of a killed process
    path = folder / f".holdfast-weights.{secrets.token_hex(8)}.partial"
    try:
        export_checkpoint(checkpoint, path, kind="safetensors", only=[key], rename={key: ""})
        found = load_file(path)
    finally:
        path.unlink(missing_ok=True)
    prefix = f"{key}."
    roots = {name: checkpoint.info(prefix + name).tied_to or prefix + name for name in found}
    return {name: found.get(root.removeprefix(prefix), found[name]) for name, root in roots.items()}
