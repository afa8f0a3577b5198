"""Exports to a folder that stock torch.distributed.checkpoint loads: one .distcp file and its metadata."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, Any

from holdfast.exchange.archive import Stored, write_archive
from holdfast.exchange.outgoing import Outgoing
from holdfast.exchange.to_torch import plant
from holdfast.restore.placing import placed_folder

DATA, METADATA = "__0_0.distcp", ".metadata"
PATTERNS = ("*.distcp", METADATA)


def write_folder(outgoing: Outgoing, folder: Path, *, overwrite: bool) -> None:
    """Write a folder for `dcp.load(state_dict, checkpoint_id=folder)`; tied tensors share their bytes.

    Raises:
        Conflict: the folder holds a DCP checkpoint already.
        Corrupt: the checkpoint is damaged; nothing was written.
        InvalidInput: two things would have one key.
        RetryLater: it could not be written.
    """
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    stored, tree = plant(outgoing)
    flat, paths = _flatten(tree, flatten_state_dict)
    with placed_folder(folder, PATTERNS, overwrite=overwrite) as partial:
        with (partial / DATA).open("wb") as file:
            places = _write_tensors(file, outgoing, stored)
            metadata = _describe(file, flat, paths, places)
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch knows it since 2.7
        (partial / METADATA).write_bytes(pickle.dumps(metadata))


def _flatten(tree: dict[str, Any], flatten: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys as DCP makes them of a tree; it knows tensors by their class, so tensors without memory go in."""
    import torch

    stands_for: dict[int, Stored] = {}
    kept: list[torch.Tensor] = []

    def swap(node: Any) -> Any:
        if isinstance(node, Stored):
            kept.append(torch.empty(0, device="meta"))
            stands_for[id(kept[-1])] = node
            return kept[-1]
        if isinstance(node, dict):
            return {key: swap(item) for key, item in node.items()}
        return type(node)(map(swap, node)) if isinstance(node, (list, tuple)) else node

    flat, paths = flatten(swap(tree))
    return {key: stands_for.get(id(item), item) for key, item in flat.items()}, paths


def _write_tensors(
    file: IO[bytes], outgoing: Outgoing, stored: dict[str, Stored]
) -> dict[str, tuple[int, int]]:
    """Offset and length of each tensor's archive, by its key."""
    feed = outgoing.feed(list(stored))
    places = {}
    for one in stored.values():
        start = file.tell()
        alone = Stored("0", one.dtype, one.shape)
        places[one.key] = (
            start,
            write_archive(file, alone, [alone], lambda part: feed.take(part.num_bytes)),
        )
    return places


def _describe(
    file: IO[bytes], flat: dict[str, Any], paths: dict[str, Any], places: dict[str, tuple[int, int]]
) -> Any:
    """DCP's metadata of all keys; values are written to the file as they come."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from holdfast.state.tensors import torch_dtype

    kinds: dict[str, Any] = {}
    items: dict[Any, Any] = {}
    for key, value in flat.items():
        if isinstance(value, Stored):
            size = torch.Size(value.shape)
            none = torch.Size([0] * len(size))
            properties = dcp.TensorProperties(dtype=torch_dtype(value.dtype))
            kinds[key] = dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(none, size)])
            items[dcp.MetadataIndex(key, none, 0)] = _StorageInfo(DATA, *places[value.key])
            continue
        data = io.BytesIO()
        torch.save(value, data)
        kinds[key] = dcp.BytesStorageMetadata()
        items[dcp.MetadataIndex(key)] = _StorageInfo(DATA, file.tell(), len(data.getvalue()))
        file.write(data.getvalue())
    return dcp.Metadata(kinds, planner_data=paths, storage_data=items, storage_meta=dcp.StorageMeta())
