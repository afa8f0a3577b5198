"""Export to folders of other trainers, which resume from them without Holdfast: Hugging Face, DeepSpeed."""

from __future__ import annotations

import importlib.util
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.weights_export import build_tree, write_hf_folder, write_tree
from holdfast.checkpoint.format.composites import shown_type
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.format.nesting import composites
from holdfast.checkpoint.restore.atomic_output import atomic_file, atomic_folder
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.errors import InvalidInput, Unsupported

STATE, STATE_FILE = "trainer_state", "trainer_state.json"
_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


def write_trainer_folder(
    selection: ExportSelection, folder: Path, *, max_shard_bytes: int, overwrite: bool
) -> None:
    """Write the folder `checkpoint-N` of a Hugging Face Trainer: weights and all that it resumes from.

    The weights have the names of the model's own parameters. Other files, such as a `config.json`, are kept.
    """
    write_training_files(selection, folder, overwrite=overwrite)
    # The weights come last: without them the Trainer refuses the folder.
    weights = _part(selection, "model", rename={"model": ""})
    write_hf_folder(weights, folder, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
    selection.num_bytes += weights.num_bytes


def write_training_files(selection: ExportSelection, folder: Path, *, overwrite: bool) -> None:
    """Write optimizer, scheduler, scaler, generators and `trainer_state.json`."""
    checkpoint = selection.checkpoint
    values = checkpoint.values()
    _check(selection, values)
    folder.mkdir(parents=True, exist_ok=True)
    for key, name in _FILES.items():
        if key in values:
            part = _part(selection, key)
            stored, tree = build_tree(part)
            content = number_parameters(tree[key]) if key == "optimizer" else tree[key]
            write_tree(folder / name, part, stored, content, overwrite=overwrite)
            selection.num_bytes += part.num_bytes
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
        for path, composite in composites(value, key):
            raise Unsupported(
                f"{path} of step {step} was saved as {shown_type(composite.type, composite.facts)}, which a "
                "folder for the Trainer cannot hold. Nothing was written. Resume through Holdfast, or export "
                "to torch.",
                step=step,
                key=path,
            )
    if selection.only is not None or selection.rename:
        raise InvalidInput(
            f"A folder for the Trainer has all of step {step}, under the Trainer's names. Nothing was "
            'written. Leave only and rename out; for the weights alone, export the prefix "model" as hf.',
            step=step,
        )


def _part(whole: ExportSelection, key: str, rename: Mapping[str, str] | None = None) -> ExportSelection:
    options = {"num_threads": whole.num_threads, "on_bytes": whole.on_bytes}
    return ExportSelection(whole.checkpoint, rank=whole.rank, only=[key], rename=rename, **options)


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
        key, position = np.asarray(numpy["state"]["key"], dtype=np.uint32), numpy["state"]["pos"]
        states["numpy"] = (numpy["bit_generator"], key, position, numpy["has_gauss"], numpy["gauss"])
    if "rng.cuda" in checkpoint and checkpoint.world_size == 1:
        states["cuda"] = checkpoint.tensor("rng.cuda", rank=rank)
    with atomic_file(path, overwrite=overwrite) as partial:
        torch.save(states, partial)


_META_KEYS = ("deepspeed", "nebula")
"""Keys of the facts about a save: of the adapter for DeepSpeed, and of the block "nebula"."""
_LATEST, _SCRIPT = "latest", "zero_to_fp32.py"


def write_deepspeed_folder(selection: ExportSelection, folder: Path, *, overwrite: bool) -> None:
    """Write the files of all ranks for `engine.load_checkpoint`, then the file `latest`; one is in memory."""
    import torch

    from holdfast.checkpoint.exchange.packed_value import KNOWN, read_partition, unpack

    checkpoint = selection.checkpoint
    key = _meta_key(checkpoint)
    if selection.only is not None or selection.rename:
        raise InvalidInput(
            "A folder for DeepSpeed has all files of all ranks, under DeepSpeed's names. Nothing was "
            "written. Leave only and rename out.",
            step=checkpoint.step,
        )
    tag = checkpoint.values()[key]["tag"]
    target = folder / tag
    target.parent.mkdir(parents=True, exist_ok=True)
    owners: dict[str, int] = {}  # the lowest rank that has saved each file
    for rank in range(checkpoint.world_size):
        for name in checkpoint.values(rank)[key]["partitions"]:
            owners.setdefault(name, rank)
    with atomic_folder(target, ["*_states.pt"], overwrite=overwrite) as partial:
        for name, rank in owners.items():
            packed = read_partition(checkpoint, rank, key, name)
            needed = [kind for _, kind, _ in packed.kinds if kind in KNOWN]
            if needed and importlib.util.find_spec("deepspeed") is None:
                raise Unsupported(
                    f"{name} has a {needed[0]}, and DeepSpeed is not installed. Nothing was written. Run "
                    "pip install deepspeed, as DeepSpeed's own scripts need it too.",
                    key=name,
                )
            with (partial / name).open("wb") as file:
                torch.save(unpack(packed.tree, packed.kinds), file)
            selection.count(sum(tensor.nbytes for tensor in packed.tensors()))
    with atomic_file(folder / _LATEST, overwrite=True) as latest:
        latest.write_text(tag)
    package = importlib.util.find_spec("deepspeed")  # which leaves a script beside its checkpoints
    for place in (package.submodule_search_locations or ()) if package is not None else ():
        script = Path(place) / "utils" / _SCRIPT
        if script.is_file():
            shutil.copyfile(script, folder / _SCRIPT)


def deepspeed_sizes(checkpoint: Checkpoint) -> list[int]:
    """Return the bytes of each tensor in a folder of DeepSpeed."""
    found: list[int] = []
    for rank in range(checkpoint.world_size):
        facts = checkpoint.facts(rank).items()
        found += [Shard.whole(name, *one).num_bytes for name, one in facts if not name.startswith("rng.")]
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
