"""From DCP's plans to the documents of a checkpoint: the catalog, the index of values, a rank's part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.adapters.dcp.claim import Claim
from holdfast.adapters.dcp.rules import rule_of
from holdfast.documents import decode_object, read_as, refuse
from holdfast.errors import InvalidInput, Unsupported
from holdfast.format import part, values
from holdfast.format.agreement import agree
from holdfast.format.catalog import Catalog, Tensor, catalog_text, parse_catalog
from holdfast.format.cuts import Box
from holdfast.format.layout import Piece, check_name
from holdfast.format.limits import MAX_DOCUMENT_BYTES
from holdfast.format.part import DataFile
from holdfast.state.tensors import NAMES

INDEX = "@dcp"
"""Key in the values of rank 0 under which the index of all ranks' values is kept."""


@dataclass(frozen=True, slots=True)
class Index:
    """Index of the values of all ranks, read before any part but rank 0's."""

    ranks: dict[str, int]  # name of a value -> the rank whose part holds it
    paths: dict[str, tuple[str | int, ...]]  # places in the nested state dict that the names do not tell

    @classmethod
    def of(cls, plans: Sequence[SavePlan]) -> Index:
        """The index of what all ranks are to write."""
        ranks: dict[str, int] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for rank, plan in enumerate(plans):
            places = plan.planner_data if isinstance(plan.planner_data, dict) else {}
            for item in plan.items:
                name = item.index.fqn
                if item.type == WriteItemType.BYTE_IO:
                    ranks.setdefault(name, rank)
                place = tuple(places.get(name, (name,)))
                if place != tuple(name.split(".")):
                    paths.setdefault(name, place)
        return cls(ranks, paths)

    def text(self) -> str:
        """JSON, kept as a string so that it is one line wherever values are shown."""
        return json.dumps({"values": self.ranks, "paths": self.paths}, ensure_ascii=False)

    @classmethod
    def parse(cls, text: object, world_size: int) -> Index:
        """The index in the text that one of `world_size` ranks keeps.

        Raises:
            Corrupt: it is something else.
        """
        if type(text) is not str:
            refuse("the values", "the index", "a text", text)
        body = decode_object(text, "the index of values", max_bytes=MAX_DOCUMENT_BYTES)
        found, paths = body.fields("values"), body.fields("paths")
        ranks = {name: found.integer(name, at_most=world_size - 1) for name in found.members}
        return cls(
            ranks, {name: read_as(tuple[str | int, ...], paths.array(name), name) for name in paths.members}
        )


def catalog_of(plans: Sequence[SavePlan]) -> bytes:
    """Return the one catalog that the parts of all ranks share.

    Returns:
        Its text, see `catalog.catalog_text`.

    Raises:
        InvalidInput: a reserved name, or ranks' regions that do not cover a tensor exactly once.
        Unsupported: a dtype that cannot be saved, or several regions of one tensor on one rank.
    """
    found: dict[str, tuple[Piece, list[tuple[int, Box]]]] = {}
    for rank, plan in enumerate(plans):
        for _, piece in pieces_of(plan, rank):
            known, rows = found.setdefault(piece.name, (piece, []))
            _check_alike(known, rows, piece, rank)
            rows.append((rank, Box(piece.offsets, piece.lengths)))
    tensors: dict[str, Tensor] = {}
    for name, (piece, rows) in found.items():
        cut = rule_of(piece.shape, rows)
        tensors[name] = Tensor(piece.dtype, piece.shape, cut, tuple(rank for rank, _ in rows))
    text = catalog_text(Catalog(tensors, {}))
    try:
        agree((text,), (0,) * len(plans))
    except InvalidInput as error:
        raise InvalidInput(f"{error} Nothing was written.", rank=error.rank, key=error.key) from error
    return text


def _check_alike(known: Piece, rows: Sequence[tuple[int, Box]], piece: Piece, rank: int) -> None:
    if (known.dtype, known.shape) != (piece.dtype, piece.shape):
        message = (
            f"Ranks disagree about {piece.name}: rank {rows[0][0]} has {known.dtype}{list(known.shape)}, "
            f"rank {rank} has {piece.dtype}{list(piece.shape)}. Nothing was written."
        )
        raise InvalidInput(message, rank=rank, key=piece.name)


def placed_in(catalog: bytes, plan: SavePlan, rank: int) -> list[tuple[WriteItem, Piece]]:
    """Return the pieces that a rank writes, in the order of the catalog.

    Raises:
        Unsupported: the planner has dropped or changed what was planned.
    """
    items = {item.index.fqn: item for item in plan.items if item.type != WriteItemType.BYTE_IO}
    placed: list[tuple[WriteItem, Piece]] = []
    for name, tensor, box in parse_catalog(catalog, "the catalog of this save").written_by(rank):
        if name not in items:
            message = (
                f"Rank {rank} was to write {name}, but its planner's finish_plan() has dropped it. The save "
                "was given up. Let the planner return the plan that it is given."
            )
            raise Unsupported(message, rank=rank, key=name)
        placed.append((items[name], Piece(name, tensor.dtype, tensor.shape, box.offsets, box.lengths)))
    return placed


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
    """Return the values that a rank writes beside tensors, as tagged JSON.

    Raises:
        InvalidInput: a value that cannot be written, named with its key.
        Unsupported: the planner does not give objects but only pickles of them.
    """
    encoded: dict[str, Any] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            continue
        name = item.index.fqn
        if name == INDEX:
            message = f"The key {INDEX!r} is reserved by the checkpoint format; rename it."
            raise InvalidInput(message, key=name)
        look_up = getattr(planner, "lookup_object", None)
        if look_up is None:
            message = (
                f"{name} is no tensor, and {type(planner).__name__} can give it only as a pickle, which a "
                "checkpoint never holds. Use DefaultSavePlanner or a subclass of it."
            )
            raise Unsupported(message, key=name)
        encoded[name] = values.encode(look_up(item.index), name)
    return encoded


def part_document(
    claim: Claim,
    rank: int,
    catalog: bytes,
    starts: tuple[int, ...],
    file: DataFile,
    encoded: dict[str, Any],
) -> bytes:
    """The part of a rank.

    Args:
        claim: what the ranks agree on.
        rank: the rank.
        catalog: what all ranks write, see `catalog_of`.
        starts: byte at which each piece of this rank begins, in the order of the catalog.
        file: size and hashes of the data file.
        encoded: the rank's values as tagged JSON.
    """
    draft = part.draft(
        run=claim.run,
        step=claim.step,
        attempt=claim.attempt,
        rank=rank,
        world_size=claim.world_size,
        ancestors=claim.ancestors,
        values=encoded,
        own=(),
        starts=starts,
        catalog=catalog,
    )
    return part.finish(draft, file)
