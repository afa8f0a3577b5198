"""Exports to one safetensors file, or to a Hugging Face folder of several with an index."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from holdfast.exchange.outgoing import Outgoing
from holdfast.exchange.selection import rename
from holdfast.format.layout import Piece
from holdfast.restore.export import write_safetensors
from holdfast.restore.placing import placed_file, placed_folder

INDEX = "model.safetensors.index.json"
PATTERNS = ("model-*-of-*.safetensors", "model.safetensors", INDEX)


def write_file(outgoing: Outgoing, path: Path, *, overwrite: bool) -> None:
    """Write all chosen tensors into one safetensors file; every key has its own bytes, tied ones too.

    Raises:
        Conflict: the file exists.
        Corrupt: the checkpoint is damaged; no file was written.
        RetryLater: it could not be written.
    """
    called = rename(outgoing.pieces, outgoing.rename)
    with placed_file(path, overwrite=overwrite) as partial:
        _write(outgoing, called, partial)


def write_folder(outgoing: Outgoing, folder: Path, *, max_shard_bytes: int, overwrite: bool) -> None:
    """Write `model.safetensors`, or shards `model-00001-of-00003.safetensors` and their index.

    Args:
        outgoing: what is written.
        folder: made if it does not exist; other files in it stay.
        max_shard_bytes: bytes of tensors in a shard; a tensor that has more gets a shard of its own.
        overwrite: replace weights that are there.

    Raises:
        Conflict: the folder holds weights already.
        Corrupt: the checkpoint is damaged; nothing was written.
        RetryLater: it could not be written.
    """
    shards = _shards(rename(outgoing.pieces, outgoing.rename), outgoing.pieces, max_shard_bytes)
    with placed_folder(folder, PATTERNS, overwrite=overwrite) as partial:
        if len(shards) == 1:
            _write(outgoing, shards[0], partial / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write(outgoing, shard, partial / name)
            weight_map |= dict.fromkeys(shard, name)
        total = sum(piece.num_bytes for piece in outgoing.pieces.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(called: dict[str, str], pieces: dict[str, Piece], max_shard_bytes: int) -> list[dict[str, str]]:
    """Names by what they are called, shard by shard, in their order."""
    shards: list[dict[str, str]] = [{}]
    filled = 0
    for new, name in called.items():
        num_bytes = pieces[name].num_bytes
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][new] = name
        filled += num_bytes
    return shards


def _write(outgoing: Outgoing, called: dict[str, str], path: Path) -> None:
    chosen = [outgoing.pieces[name] for name in called.values()]

    def feed(order: list[int]) -> Iterator[memoryview]:
        pieces = [chosen[index] for index in order]
        given = outgoing.feed([piece.name for piece in pieces])
        return itertools.chain.from_iterable(given.take(piece.num_bytes) for piece in pieces)

    renamed = [Piece.whole(new, piece.dtype, piece.shape) for new, piece in zip(called, chosen, strict=True)]
    write_safetensors(path, renamed, feed)
