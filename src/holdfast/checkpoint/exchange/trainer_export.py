"""Export to a folder `checkpoint-N` of Hugging Face's Trainer, which resumes from it without Holdfast."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.exchange import safetensors_export
from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.torch_export import build_tree, write_tree
from holdfast.checkpoint.format.composites import shown_type
from holdfast.checkpoint.format.nesting import composites
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.errors import InvalidInput, Unsupported

STATE, STATE_FILE = "trainer_state", "trainer_state.json"
_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


def write_folder(selection: ExportSelection, folder: Path, *, max_shard_bytes: int, overwrite: bool) -> None:
    """Write weights, optimizer, scheduler, scaler, generators and `trainer_state.json`.

    The weights have the names of the model's own parameters. A `config.json` is not written, but kept. The
    weights come last: without them the Trainer refuses the folder.

    Args:
        selection: a whole checkpoint of a Trainer that was attached to Holdfast.
        folder: created if it does not exist. Other files in it are kept.
        max_shard_bytes: maximum bytes of tensors in a shard of the weights.
        overwrite: replace files of an older export.
    """
    write_training_files(selection, folder, overwrite=overwrite)
    weights = _part(selection, "model", rename={"model": ""})
    safetensors_export.write_folder(weights, folder, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
    selection.num_bytes += weights.num_bytes


def write_training_files(selection: ExportSelection, folder: Path, *, overwrite: bool) -> None:
    """Write everything but the weights; see `write_folder`."""
    checkpoint = selection.checkpoint
    values = checkpoint.values()
    _check(selection, values)
    folder.mkdir(parents=True, exist_ok=True)
    for key, name in _FILES.items():
        if key in values:
            _write_value(selection, key, folder / name, overwrite=overwrite)
    if "optimizer" in values:  # else the Trainer's own folder would not have generators either
        for rank in range(checkpoint.world_size):
            name = "rng_state.pth" if checkpoint.world_size == 1 else f"rng_state_{rank}.pth"
            _write_generators(checkpoint, rank, folder / name, overwrite=overwrite)
    with atomic_file(folder / STATE_FILE, overwrite=True) as partial:
        partial.write_text(values[STATE])


def _check(selection: ExportSelection, values: Mapping[str, Any]) -> None:
    step = selection.checkpoint.step
    if not isinstance(values.get(STATE), str):
        raise InvalidInput(
            f"Step {step} was not saved by a Hugging Face Trainer through holdfast.adapters.transformers: it "
            f"has no {STATE}. Nothing was written. Export it to another format, such as torch.",
            step=step,
        )
    for key, value in values.items():
        for path, one in composites(value, key):
            raise Unsupported(
                f"{path} of step {step} was saved as {shown_type(one.type, one.facts)}, which a folder for "
                "the Trainer cannot hold. Nothing was written. Resume through Holdfast, or export to torch.",
                step=step,
                key=path,
            )
    if selection.only is not None or selection.rename:
        raise InvalidInput(
            f"A folder for the Trainer has all of step {step}, under the Trainer's names. Nothing was "
            'written. Leave only and rename out; for the weights alone, export the prefix "model" as hf.',
            step=step,
        )


def _part(
    selection: ExportSelection, key: str, *, rename: Mapping[str, str] | None = None
) -> ExportSelection:
    part = ExportSelection.choose(
        selection.checkpoint,
        rank=selection.rank,
        only=[key],
        rename=rename,
        num_threads=selection.num_threads,
    )
    part.on_bytes = selection.on_bytes
    return part


def _write_value(selection: ExportSelection, key: str, path: Path, *, overwrite: bool) -> None:
    part = _part(selection, key)
    stored, tree = build_tree(part)
    content = number_parameters(tree[key]) if key == "optimizer" else tree[key]
    write_tree(path, part, stored, content, overwrite=overwrite)
    selection.num_bytes += part.num_bytes


def number_parameters(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer by numbers of parameters, as `state_dict()` has it."""
    groups = [dict(group) for group in optimizer["param_groups"]]
    names = [name for group in groups for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    for group in groups:
        group["params"] = [number_of[name] for name in group["params"]]
    state = {number_of[name]: item for name, item in optimizer.get("state", {}).items()}
    return {**optimizer, "state": dict(sorted(state.items())), "param_groups": groups}


def _write_generators(checkpoint: Checkpoint, rank: int, path: Path, *, overwrite: bool) -> None:
    """Write the generators of a rank, in the form of `random.getstate()` and its counterparts."""
    import numpy as np
    import torch

    saved: dict[str, Any] = checkpoint.values(rank)["rng"]
    python = saved["python"]
    words = struct.unpack(f"<{len(python['words']) // 4}I", python["words"])
    states: dict[str, Any] = {
        "python": (python["version"], words, python["gauss"]),
        "cpu": checkpoint.tensor("rng.torch", rank=rank),
    }
    if (numpy := saved.get("numpy")) is not None:
        inner = numpy["state"]
        states["numpy"] = (
            numpy["bit_generator"],
            np.asarray(inner["key"], dtype=np.uint32),
            inner["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        )
    if "rng.cuda" in checkpoint and checkpoint.world_size == 1:
        states["cuda"] = checkpoint.tensor("rng.cuda", rank=rank)
    with atomic_file(path, overwrite=overwrite) as partial:
        torch.save(states, partial)
