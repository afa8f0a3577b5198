"""Export of tensors to one plain safetensors file, written as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from holdfast.checkpoint.format.layout import Shard, lay_out
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import ReadStats
from holdfast.checkpoint.restore.slices import read_slices
from holdfast.checkpoint.store.contract import Buffer, Store


def write_safetensors(
    path: Path, shards: Sequence[Shard], feed: Callable[[list[int]], Iterable[Buffer]]
) -> None:
    """Write whole tensors into a safetensors file, from its first byte to its last.

    Args:
        shards: name, dtype and shape of each tensor.
        feed: returns the bytes of tensors in the order of the given indices of `shards`; a buffer may be
            reused once the next one is requested.

    Raises:
        InvalidInput: a reserved name, two tensors of one name, or too many of them.
        OSError: the file could not be written.
    """
    layout = lay_out(list(shards), 0)
    order = sorted(range(len(shards)), key=lambda index: layout.starts[index])
    with path.open("wb") as file:
        file.write(layout.header)
        for view in feed(order):
            file.write(view)
        assert file.tell() == layout.file_bytes, (file.tell(), layout.file_bytes)


def export(
    store: Store, parts: Parts, path: Path, *, rank: int = 0, overwrite: bool = False, num_threads: int = 4
) -> ReadStats:
    """Write a rank's tensors of a checkpoint into one safetensors file.

    Every key has its own bytes, tied ones too, so that any safetensors reader returns a complete state dict.
    The file gets its name when it is complete.

    Args:
        path: the file to write; its directory must exist.
        rank: rank whose per-rank tensors are written.

    Raises:
        Conflict: the file exists.
        InvalidInput: the path is a folder, or its folder does not exist.
        Corrupt: damage was found; no file was written.
        NotFound: a file of the checkpoint is missing.
        RetryLater: the store failed, or the file could not be written.

    Blocks: until the file is durable.
    """
    began = time.perf_counter()
    tied = parts.manifest.tied
    found = {key: parts.shape_of(tied.get(key, key), rank) for key in [*parts.manifest.tensors, *tied]}
    shards = [Shard.whole(key, *saved) for key, saved in found.items() if saved is not None]
    reads: list[ReadStats] = []

    def feed(order: list[int]) -> Iterable[Buffer]:
        names = [tied.get(shards[index].name, shards[index].name) for index in order]
        slices = read_slices(store, parts, names, rank, num_threads=num_threads, on_read=reads.append)
        return (one.view for one in slices)

    with atomic_file(path, overwrite=overwrite) as partial:
        write_safetensors(partial, shards, feed)
    num_bytes, num_reads = (sum(one.num_bytes for one in reads), sum(one.num_reads for one in reads))
    return ReadStats(num_bytes, num_reads, time.perf_counter() - began)
