"""Export to a file of torch.save, or to a folder for torch.distributed.checkpoint."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, Any

from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.torch_archive import ArchivedTensor, write_archive
from holdfast.checkpoint.exchange.trees import make_plain, nest, rename_top_level
from holdfast.checkpoint.format.nesting import plain_form, unflatten
from holdfast.checkpoint.restore.atomic_output import atomic_file, atomic_folder


def write_file(selection: ExportSelection, path: Path, *, overwrite: bool) -> None:
    """Write a file for `torch.load(path, weights_only=True, mmap=True)`."""
    stored, tree = build_tree(selection)
    write_tree(path, selection, stored, tree, overwrite=overwrite)


def write_tree(
    path: Path, selection: ExportSelection, stored: dict[str, ArchivedTensor], tree: Any, *, overwrite: bool
) -> None:
    """Write a file of torch.save with a tree from `build_tree`, or a part of it that has all its tensors."""
    stream = selection.stream(list(stored))
    with atomic_file(path, overwrite=overwrite) as partial, partial.open("wb") as file:
        write_archive(file, tree, stored.values(), lambda one: stream.read(one.num_bytes))


def build_tree(selection: ExportSelection) -> tuple[dict[str, ArchivedTensor], dict[str, Any]]:
    """Return a placeholder per stored tensor, and the nested state dict that refers to them."""
    stored: dict[str, ArchivedTensor] = {}
    for name, one in selection.tensors.items():
        if selection.original(name) == name:
            stored[name] = ArchivedTensor(str(len(stored)), one.dtype, one.shape)

    def tensor(name: str) -> ArchivedTensor:
        return stored[selection.original(name)]

    index = selection.checkpoint.value_index()
    if index is None:
        tree = unflatten(selection.tensors, selection.values(), tensor, selection.only)
    else:
        leaves = {name: plain_form(value) for name, value in selection.values().items()}
        leaves |= {name: tensor(name) for name in selection.tensors}
        tree = nest({index.path(name): leaf for name, leaf in leaves.items()})
    return stored, rename_top_level(make_plain(tree, ArchivedTensor), selection.rename)


DATA, METADATA = "__0_0.distcp", ".metadata"
PATTERNS = ("*.distcp", METADATA)


def write_folder(selection: ExportSelection, folder: Path, *, overwrite: bool) -> None:
    """Write a folder for `dcp.load(state_dict, checkpoint_id=folder)`. Tied tensors share their bytes."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    stored, tree = build_tree(selection)
    flat, paths = _flatten(tree, flatten_state_dict)
    with atomic_folder(folder, PATTERNS, overwrite=overwrite) as partial:
        with (partial / DATA).open("wb") as file:
            ranges = _write_tensors(file, selection, stored)
            metadata = _describe(file, flat, paths, ranges)
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # since torch 2.7
        (partial / METADATA).write_bytes(pickle.dumps(metadata))


def _flatten(tree: dict[str, Any], flatten: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flatten a tree with DCP's keys. DCP recognizes tensors by class, so meta tensors are inserted."""
    import torch

    from holdfast.checkpoint.format.containers import kind_of

    by_id: dict[int, ArchivedTensor] = {}
    tensors: list[torch.Tensor] = []

    def replace(node: Any) -> Any:
        if isinstance(node, ArchivedTensor):
            tensors.append(torch.empty(0, device="meta"))
            by_id[id(tensors[-1])] = node
            return tensors[-1]
        container = kind_of(node)
        if container is None:
            return node
        return container.rebuild(node, [(key, replace(item)) for key, item in container.items(node)])

    flat, paths = flatten(replace(tree))
    return {key: by_id.get(id(item), item) for key, item in flat.items()}, paths


def _write_tensors(
    file: IO[bytes], selection: ExportSelection, stored: dict[str, ArchivedTensor]
) -> dict[str, tuple[int, int]]:
    """Write an archive per tensor; return the offset and length of each by key."""
    stream = selection.stream(list(stored))
    ranges = {}
    for one in stored.values():
        start = file.tell()
        alone = ArchivedTensor("0", one.dtype, one.shape)
        ranges[one.key] = (
            start,
            write_archive(file, alone, [alone], lambda part: stream.read(part.num_bytes)),
        )
    return ranges


def _describe(
    file: IO[bytes], flat: dict[str, Any], paths: dict[str, Any], ranges: dict[str, tuple[int, int]]
) -> Any:
    """Write the values to the file, and return DCP's metadata of all keys."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from holdfast.checkpoint.state.tensors import torch_dtype

    kinds: dict[str, Any] = {}
    items: dict[Any, Any] = {}
    for key, value in flat.items():
        if isinstance(value, ArchivedTensor):
            size = torch.Size(value.shape)
            none = torch.Size([0] * len(size))
            properties = dcp.TensorProperties(dtype=torch_dtype(value.dtype))
            kinds[key] = dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(none, size)])
            items[dcp.MetadataIndex(key, none, 0)] = _StorageInfo(DATA, *ranges[value.key])
            continue
        data = io.BytesIO()
        torch.save(value, data)
        kinds[key] = dcp.BytesStorageMetadata()
        items[dcp.MetadataIndex(key)] = _StorageInfo(DATA, file.tell(), len(data.getvalue()))
        file.write(data.getvalue())
    return dcp.Metadata(kinds, planner_data=paths, storage_data=items, storage_meta=dcp.StorageMeta())
