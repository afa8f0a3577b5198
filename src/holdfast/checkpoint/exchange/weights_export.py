"""Export to files of other libraries: safetensors, Hugging Face folders, torch.save, DCP folders."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import IO, Any

from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.torch_archive import write_archive
from holdfast.checkpoint.exchange.trees import make_plain, nest, rename, rename_top_level
from holdfast.checkpoint.format.layout import Shard, lay_out
from holdfast.checkpoint.format.nesting import change_items, plain_form, unflatten
from holdfast.checkpoint.restore.atomic_output import atomic_file, atomic_folder

_HF_INDEX = "model.safetensors.index.json"
_HF_PATTERNS = ("model-*-of-*.safetensors", "model.safetensors", _HF_INDEX)
_DCP_DATA, _DCP_METADATA = "__0_0.distcp", ".metadata"
_DCP_PATTERNS = ("*.distcp", _DCP_METADATA)


def write_safetensors_file(selection: ExportSelection, path: Path, *, overwrite: bool) -> None:
    """Write all selected tensors into one safetensors file. Tied tensors are written once per name."""
    renamed = rename(selection.tensors, selection.rename)
    with atomic_file(path, overwrite=overwrite) as partial:
        _write_safetensors(selection, renamed, partial)


def write_hf_folder(
    selection: ExportSelection, folder: Path, *, max_shard_bytes: int, overwrite: bool
) -> None:
    """Write `model.safetensors`, or shards `model-00001-of-00003.safetensors` and their index.

    The folder is created if it does not exist; other files in it are kept. A tensor that is larger than a
    shard gets a shard of its own.
    """
    shards: list[dict[str, str]] = [{}]  # of each, old names by new ones
    filled = 0
    for new, name in rename(selection.tensors, selection.rename).items():
        num_bytes = selection.tensors[name].num_bytes
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][new] = name
        filled += num_bytes
    with atomic_folder(folder, _HF_PATTERNS, overwrite=overwrite) as partial:
        if len(shards) == 1:
            _write_safetensors(selection, shards[0], partial / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_safetensors(selection, shard, partial / name)
            weight_map |= dict.fromkeys(shard, name)
        total = sum(tensor.num_bytes for tensor in selection.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / _HF_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_safetensors(selection: ExportSelection, renamed: dict[str, str], path: Path) -> None:
    """Write tensors into a safetensors file, from its first byte to its last; `renamed` has old names."""
    names = list(renamed.values())
    chosen = [selection.tensors[name] for name in names]
    pairs = zip(renamed, chosen, strict=True)
    layout = lay_out([Shard.whole(new, one.dtype, one.shape) for new, one in pairs], 0)
    order = sorted(range(len(chosen)), key=lambda index: layout.starts[index])
    read = selection.stream([names[index] for index in order])
    with path.open("wb") as file:
        file.write(layout.header)
        for index in order:
            for view in read(chosen[index].num_bytes):
                file.write(view)
        assert file.tell() == layout.file_bytes, (file.tell(), layout.file_bytes)


def write_torch_file(selection: ExportSelection, path: Path, *, overwrite: bool) -> None:
    """Write a file for `torch.load(path, weights_only=True, mmap=True)`."""
    stored, tree = build_tree(selection)
    write_tree(path, selection, stored, tree, overwrite=overwrite)


def write_tree(
    path: Path, selection: ExportSelection, stored: dict[str, Shard], tree: Any, *, overwrite: bool
) -> None:
    """Write a file of torch.save with a tree from `build_tree`, or a part of it that has all its tensors."""
    read = selection.stream(list(stored))
    with atomic_file(path, overwrite=overwrite) as partial, partial.open("wb") as file:
        write_archive(file, tree, stored.values(), lambda one: read(one.num_bytes))


def build_tree(selection: ExportSelection) -> tuple[dict[str, Shard], dict[str, Any]]:
    """Return a placeholder per stored tensor, and the nested state dict that refers to them."""
    stored: dict[str, Shard] = {}
    for name, info in selection.tensors.items():
        if selection.original(name) == name:
            stored[name] = Shard.whole(str(len(stored)), info.dtype, info.shape)

    def tensor(name: str) -> Shard:
        return stored[selection.original(name)]

    index = selection.checkpoint.value_index()
    if index is None:
        tree = unflatten(selection.tensors, selection.values(), tensor)
    else:
        leaves = {name: plain_form(value) for name, value in selection.values().items()}
        leaves |= {name: tensor(name) for name in selection.tensors}
        tree = nest({index.path(name): leaf for name, leaf in leaves.items()})
    return stored, rename_top_level(make_plain(tree, Shard), selection.rename)


def write_dcp_folder(selection: ExportSelection, folder: Path, *, overwrite: bool) -> None:
    """Write a folder for `dcp.load(state_dict, checkpoint_id=folder)`. Tied tensors share their bytes."""
    from torch.distributed.checkpoint import filesystem

    stored, tree = build_tree(selection)
    flat, paths = _flatten(tree)
    read = selection.stream(list(stored))
    places: dict[str, tuple[int, int]] = {}  # offset and length of each archive
    with atomic_folder(folder, _DCP_PATTERNS, overwrite=overwrite) as partial:
        with (partial / _DCP_DATA).open("wb") as file:
            for tensor in stored.values():
                start, alone = file.tell(), Shard.whole("0", tensor.dtype, tensor.shape)
                length = write_archive(file, alone, [alone], lambda part: read(part.num_bytes))
                places[tensor.name] = start, length
            metadata = _describe(file, flat, paths, places)
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # since torch 2.7
        (partial / _DCP_METADATA).write_bytes(pickle.dumps(metadata))


def _flatten(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flatten a tree with DCP's keys. DCP recognizes tensors by class, so meta tensors are inserted."""
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    by_id: dict[int, Shard] = {}
    tensors: list[torch.Tensor] = []

    def replace(node: Any) -> Any:
        if isinstance(node, Shard):
            tensors.append(torch.empty(0, device="meta"))
            by_id[id(tensors[-1])] = node
            return tensors[-1]
        return change_items(node, lambda item, _: replace(item))

    flat, paths = flatten_state_dict(replace(tree))
    return {key: by_id.get(id(item), item) for key, item in flat.items()}, paths


def _describe(file: IO[bytes], flat: dict[str, Any], paths: Any, places: dict[str, tuple[int, int]]) -> Any:
    """Write the values to the file, and return DCP's metadata of all keys."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from holdfast.checkpoint.state.tensors import torch_dtype

    kinds: dict[str, Any] = {}
    items: dict[Any, Any] = {}
    for key, value in flat.items():
        if isinstance(value, Shard):
            size = torch.Size(value.shape)
            none = torch.Size([0] * len(size))
            properties = dcp.TensorProperties(dtype=torch_dtype(value.dtype))
            kinds[key] = dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(none, size)])
            items[dcp.MetadataIndex(key, none, 0)] = _StorageInfo(_DCP_DATA, *places[value.name])
            continue
        data = io.BytesIO()
        torch.save(value, data)
        kinds[key] = dcp.BytesStorageMetadata()
        items[dcp.MetadataIndex(key)] = _StorageInfo(_DCP_DATA, file.tell(), len(data.getvalue()))
        file.write(data.getvalue())
    return dcp.Metadata(kinds, planner_data=paths, storage_data=items, storage_meta=dcp.StorageMeta())
