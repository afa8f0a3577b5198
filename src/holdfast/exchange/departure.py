"""Export: from a checkpoint to another format, so that nobody needs Holdfast to get out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.exchange import to_dcp, to_safetensors, to_torch
from holdfast.exchange.outgoing import Outgoing
from holdfast.restore.checkpoint import Checkpoint
from holdfast.units import parse_bytes

KINDS = ("safetensors", "hf", "torch", "dcp")
"""What can be written: a file, a Hugging Face folder, a file of torch.save, a DCP folder."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did. `num_bytes` counts bytes of tensors."""

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
    kind: str = "safetensors",
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    max_shard_bytes: int | str = "5GB",
    rank: int = 0,
    overwrite: bool = False,
    num_threads: int = 4,
    on_total: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Exported:
    """Write a checkpoint, or a part of it, in another format; every byte is verified on the way.

    safetensors and Hugging Face folders hold tensors only. Files of torch.save and DCP folders hold the
    values too, as plain ones: arrays become lists, paths become texts.

    Memory: some 50 MiB beside torch, whatever the size.

    Args:
        checkpoint: as `holdfast.open` gives it.
        path: the file or folder; its parent must exist.
        kind: one of `KINDS`.
        only: prefixes of the names that are taken ("model" takes "model.weight"); default all.
        rename: prefix -> what stands in its place; "" takes it off with its dot. For torch and DCP, whose
            trees are nested, only top-level keys can be renamed.
        max_shard_bytes: of tensors in a shard of a Hugging Face folder, such as "5GB".
        rank: whose copies of per-rank tensors and values are taken.
        overwrite: replace an older export.
        num_threads: threads that read and hash.
        on_total: called once with the bytes of all tensors, before they are read.
        on_bytes: called with the bytes of tensors when they have been verified.

    Raises:
        Conflict: there is something already and `overwrite` is False.
        NotFound: nothing is under a prefix, or a file of the checkpoint is missing.
        InvalidInput: an unknown kind, two things with one name, or a path that cannot be.
        Corrupt: the checkpoint is damaged; nothing was written.
        RetryLater: the store failed, or it could not be written.

    Ranks: not collective; one process.
    Blocks: until what was written is durable.
    """
    began = time.perf_counter()
    place, limit = Path(path).expanduser(), parse_bytes(max_shard_bytes, "max_shard_bytes")
    outgoing = Outgoing.choose(checkpoint, rank=rank, only=only, rename=rename, num_threads=num_threads)
    outgoing.on_bytes = on_bytes
    writers: dict[str, Callable[[], None]] = {
        "safetensors": lambda: to_safetensors.write_file(outgoing, place, overwrite=overwrite),
        "hf": lambda: to_safetensors.write_folder(
            outgoing, place, max_shard_bytes=limit, overwrite=overwrite
        ),
        "torch": lambda: to_torch.write_file(outgoing, place, overwrite=overwrite),
        "dcp": lambda: to_dcp.write_folder(outgoing, place, overwrite=overwrite),
    }
    if kind not in writers:
        raise InvalidInput(f"{kind!r} is no kind of export; there are: {', '.join(KINDS)}.")
    if on_total is not None:
        on_total(_total(outgoing, shared=kind in ("torch", "dcp")))
    writers[kind]()
    seconds = time.perf_counter() - began
    return Exported(str(place), checkpoint.step, kind, len(outgoing.pieces), outgoing.num_bytes, seconds)


def _total(outgoing: Outgoing, *, shared: bool) -> int:
    return sum(
        piece.num_bytes
        for name, piece in outgoing.pieces.items()
        if not shared or outgoing.original(name) == name
    )
