"""Export to one safetensors file, or to a Hugging Face folder with an index."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.trees import rename
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.restore.atomic_output import atomic_file, atomic_folder
from holdfast.checkpoint.restore.slices import write_safetensors

INDEX = "model.safetensors.index.json"
PATTERNS = ("model-*-of-*.safetensors", "model.safetensors", INDEX)


def write_file(selection: ExportSelection, path: Path, *, overwrite: bool) -> None:
    """Write all selected tensors into one safetensors file. Tied tensors are written once per name."""
    renamed = rename(selection.tensors, selection.rename)
    with atomic_file(path, overwrite=overwrite) as partial:
        _write(selection, renamed, partial)


def write_folder(selection: ExportSelection, folder: Path, *, max_shard_bytes: int, overwrite: bool) -> None:
    """Write `model.safetensors`, or shards `model-00001-of-00003.safetensors` and their index.

    Args:
        folder: created if it does not exist. Other files in it are kept.
        max_shard_bytes: maximum bytes of tensors in a shard. A larger tensor gets a shard of its own.
    """
    shards = _shards(rename(selection.tensors, selection.rename), selection.tensors, max_shard_bytes)
    with atomic_folder(folder, PATTERNS, overwrite=overwrite) as partial:
        if len(shards) == 1:
            _write(selection, shards[0], partial / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write(selection, shard, partial / name)
            weight_map |= dict.fromkeys(shard, name)
        total = sum(tensor.num_bytes for tensor in selection.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(renamed: dict[str, str], tensors: dict[str, Shard], max_shard_bytes: int) -> list[dict[str, str]]:
    """Return old names by new ones, shard by shard, in their order."""
    shards: list[dict[str, str]] = [{}]
    filled = 0
    for new, name in renamed.items():
        num_bytes = tensors[name].num_bytes
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][new] = name
        filled += num_bytes
    return shards


def _write(selection: ExportSelection, renamed: dict[str, str], path: Path) -> None:
    chosen = [selection.tensors[name] for name in renamed.values()]

    def feed(order: list[int]) -> Iterator[memoryview]:
        tensors = [chosen[index] for index in order]
        stream = selection.stream([tensor.name for tensor in tensors])
        return itertools.chain.from_iterable(stream.read(tensor.num_bytes) for tensor in tensors)

    tensors = [
        Shard.whole(new, tensor.dtype, tensor.shape) for new, tensor in zip(renamed, chosen, strict=True)
    ]
    write_safetensors(path, tensors, feed)
