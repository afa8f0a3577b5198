"""From a DCP plan to the documents of a checkpoint: a rank's pieces, its values, its part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.adapters.dcp.claim import Claim
from holdfast.errors import InvalidInput, Unsupported
from holdfast.format import part, values
from holdfast.format.layout import Piece, check_name
from holdfast.format.part import DataFile
from holdfast.state.tensors import NAMES

PATHS = "@dcp"
"""Key in a rank's values under which the place of each of its names in the nested state dict is kept."""


def pieces_of(plan: SavePlan, rank: int) -> list[tuple[WriteItem, Piece]]:
    """The tensors that a rank is to write. A shard without elements of a tensor that has some is left out.

    Raises:
        InvalidInput: a reserved name.
        Unsupported: a dtype that cannot be saved, or several regions of one tensor on one rank.
    """
    found: dict[str, tuple[WriteItem, Piece]] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            continue
        piece = _piece(item)
        check_name(piece.name)
        if not piece.num_bytes and 0 not in piece.shape:
            continue
        if piece.name in found:
            message = (
                f"Rank {rank} is to write two regions of {piece.name}, at {list(piece.offsets)} and at "
                f"{list(found[piece.name][1].offsets)}. A rank can write one region of a tensor. Nothing was "
                "written."
            )
            raise Unsupported(message, rank=rank, key=piece.name)
        found[piece.name] = item, piece
    return list(found.values())


def _piece(item: WriteItem) -> Piece:
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    dtype = NAMES.get(data.properties.dtype)
    if dtype is None:
        message = (
            f"{name} cannot be saved: the safetensors format has no dtype for {data.properties.dtype}. "
            "Nothing was written."
        )
        raise Unsupported(message, key=name)
    return Piece(name, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def values_of(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """What a rank is to write beside tensors, as tagged JSON, and where its names stand in the state dict.

    Raises:
        InvalidInput: a value that cannot be written, named with its key.
        Unsupported: the planner does not give objects but only pickles of them.
    """
    encoded: dict[str, Any] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            continue
        name = item.index.fqn
        if name == PATHS:
            message = f"The key {PATHS!r} is reserved by the checkpoint format; rename it."
            raise InvalidInput(message, key=name)
        look_up = getattr(planner, "lookup_object", None)
        if look_up is None:
            message = (
                f"{name} is no tensor, and {type(planner).__name__} can give it only as a pickle, which a "
                "checkpoint never holds. Use DefaultSavePlanner or a subclass of it."
            )
            raise Unsupported(message, key=name)
        encoded[name] = values.encode(look_up(item.index), name)
    encoded[PATHS] = _paths_text(plan)
    return encoded


def _paths_text(plan: SavePlan) -> str:
    """JSON in a string, so that it is one line wherever values are shown."""
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    own = {item.index.fqn: list(paths.get(item.index.fqn, (item.index.fqn,))) for item in plan.items}
    return json.dumps(
        {name: path for name, path in own.items() if path != name.split(".")}, ensure_ascii=False
    )


def paths_in(text: str) -> dict[str, tuple[str | int, ...]]:
    """The places that a rank's values keep; a name that is not among them stands where its dots say.

    Raises:
        ValueError: it is something else.
    """
    return {name: tuple(path) for name, path in json.loads(text).items()}


def part_document(
    claim: Claim,
    rank: int,
    pieces: Sequence[Piece],
    starts: tuple[int, ...],
    file: DataFile,
    encoded: dict[str, Any],
) -> bytes:
    """The part of a rank.

    Args:
        claim: what the ranks agree on.
        rank: the rank.
        pieces: what stands in its data file.
        starts: byte at which each piece begins.
        file: size and hashes of the data file.
        encoded: the rank's values as tagged JSON.
    """
    draft = part.draft(
        run=claim.run,
        step=claim.step,
        attempt=claim.attempt,
        rank=rank,
        world_size=claim.world_size,
        base_step=claim.base_step,
        pieces=part.pieces_text(list(pieces), starts),
        tied={},
        values=encoded,
    )
    return part.finish(draft, file)
