"""Checkpoints for tests, made with the format's own functions, without a trainer or a keeper."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from holdfast.format import manifest, names, part, run, values
from holdfast.format.dtypes import TORCH_NAMES
from holdfast.format.hashes import chunk_bytes_for, chunk_ranges, digest
from holdfast.format.layout import Piece, lay_out
from holdfast.format.manifest import Manifest
from holdfast.store.contract import Store

RUN_ID = "run-one"
CREATED_UNIX_S = 1_700_000_000.0
_NAMES = {getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items()}

Region = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]
"""A rank's part of a tensor: its elements, their offsets, the whole tensor's shape."""


def make_home(store: Store, *, run_id: str = RUN_ID, attempts: Sequence[int] = (1,)) -> None:
    """Make `holdfast.json` and the claims of some attempts."""
    store.put(names.RUN, run.document(run.Run(run_id, CREATED_UNIX_S)))
    for number in attempts:
        claim = run.Attempt(number, run_id, 1, "host", 1000 + number, CREATED_UNIX_S + number)
        store.put(names.attempt(number), run.document(claim))


def make_checkpoint(
    store: Store,
    step: int,
    attempt: int = 1,
    tensors: Sequence[Mapping[str, torch.Tensor | Region]] = ({},),
    *,
    per_rank: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    values: Sequence[Mapping[str, Any]] | None = None,
    base_step: int | None = None,
    run_id: str = RUN_ID,
    chunk_bytes: int | None = None,
    commit: bool = True,
    id: str | None = None,
    created_unix_s: float = CREATED_UNIX_S,
) -> Manifest:
    """Write a whole checkpoint: every rank's data file and part, and the manifest.

    Args:
        store: the home.
        step: step of the checkpoint.
        attempt: attempt that saves it.
        tensors: what each rank writes; a `Region` where it writes only a region.
        per_rank: names of which every rank writes its own.
        tied: alias -> name.
        values: each rank's values by top-level key, not encoded; default none.
        base_step: step that the attempt was restored from.
        run_id: the run.
        chunk_bytes: size of the hashed chunks; default as the format chooses.
        commit: write the manifest.
        id: the manifest's id; default made from step and attempt.
        created_unix_s: the manifest's time.

    Returns:
        The manifest, written or not.
    """
    parts = []
    for rank, held in enumerate(tensors):
        pieces, data = _pieces(held, per_rank)
        layout = lay_out(pieces, rank)
        image = bytearray(layout.file_bytes)
        image[: len(layout.header)] = layout.header
        for start, raw in zip(layout.starts, data, strict=True):
            image[start : start + len(raw)] = raw
        draft = part.draft(
            run=run_id,
            step=step,
            attempt=attempt,
            rank=rank,
            world_size=len(tensors),
            base_step=base_step,
            pieces=part.pieces_text(pieces, layout.starts),
            tied=dict(tied or {}),
            values=_encoded(values[rank] if values else {}),
        )
        document = part.finish(draft, data_file(bytes(image), chunk_bytes))
        store.put(names.data(step, attempt, rank), bytes(image))
        store.put(names.part(step, attempt, rank), document)
        parts.append((part.parse(document, "part"), document))
    merged = manifest.merge(parts, id=id or f"id-{step}-{attempt}", created_unix_s=created_unix_s)
    if commit:
        store.put(names.manifest(step, attempt), manifest.document(merged))
    return merged


def data_file(image: bytes, chunk_bytes: int | None = None) -> part.DataFile:
    """Size and chunk hashes of a file image."""
    size = chunk_bytes or chunk_bytes_for(len(image))
    chunks = tuple(digest(image[start:stop]) for start, stop in chunk_ranges(len(image), size))
    return part.DataFile(len(image), size, chunks)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's row-major bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _pieces(
    held: Mapping[str, torch.Tensor | Region], per_rank: Collection[str]
) -> tuple[list[Piece], list[bytes]]:
    pieces, data = [], []
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            own = Piece.whole(name, _NAMES[value.dtype], tuple(value.shape), per_rank=name in per_rank)
            tensor = value
        else:
            tensor, offsets, shape = value
            own = Piece(name, _NAMES[tensor.dtype], shape, offsets, tuple(tensor.shape))
        pieces.append(own)
        data.append(raw_bytes(tensor))
    return pieces, data


def _encoded(held: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values.encode(value, key) for key, value in held.items()}
