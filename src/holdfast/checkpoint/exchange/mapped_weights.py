"""Weights of a checkpoint as tensors that are mapped from a file."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint.exchange.exporter import export_checkpoint
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.system.linux.partial_files import remove_partial_files

if TYPE_CHECKING:
    import torch


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
